"""Wrong block formats that mypy --strict finds; an ignore that nothing needs is an error itself."""

from dataclasses import dataclass

import torch
from torch import nn

from vescale_fsdp import BlockFormat, ParamPolicy, fully_shard
from vescale_fsdp.optim import AdamW8bit


@dataclass(frozen=True)
class WithoutScales:
    name: str = "without_scales"
    block_shape: tuple[int, ...] = (64,)
    bits: int = 8
    scale_dtype: torch.dtype = torch.float32

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


layer = nn.Linear(4, 4)
wrong: BlockFormat = WithoutScales()  # type: ignore[assignment]
ParamPolicy(format=WithoutScales())  # type: ignore[arg-type]
AdamW8bit(layer.parameters(), state_format=WithoutScales())  # type: ignore[arg-type]
AdamW8bit(layer.parameters(), bits=8)  # type: ignore[call-arg]
fully_shard(layer, param_policy=lambda fqn, param: "fp8_block")  # type: ignore[arg-type, return-value]
