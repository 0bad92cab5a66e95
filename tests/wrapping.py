"""A model with `blocks` wrapped bottom-up, and full values of whatever comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import fully_shard

__all__ = ["full", "wrapped"]


def wrapped(model: nn.Module, shard: Callable[..., object] = fully_shard, **kwargs: Any) -> nn.Module:
    for block in getattr(model, "blocks", ()):
        shard(block, **kwargs)
    shard(model, **kwargs)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
