"""What a training run is asked to do: one frozen value that checks itself before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["Dtype", "EngineName", "OptimizerName", "Settings"]


class EngineName(StrEnum):
    """Who shards the model; every engine trains the same model on the same batches from the same initial values."""

    VESCALE = "vescale"
    FSDP2 = "fsdp2"
    DDP = "ddp"
    SINGLE = "single"


class OptimizerName(StrEnum):
    """Who updates the matrices of the blocks; everything else is AdamW's. adamw8bit is for all, with 8-bit state."""

    ADAMW = "adamw"
    ADAMW8BIT = "adamw8bit"
    MUON = "muon"
    SHAMPOO = "shampoo"


class Dtype(StrEnum):
    """fp32: everything. bf16: compute in bf16; parameters, reductions and optimizer in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `batch` counts sequences over all ranks, so a loss curve does not depend on `ranks`."""

    engine: EngineName = EngineName.VESCALE
    ranks: int = 4
    steps: int = 240
    batch: int = 16
    seq: int = 128
    layers: int = 4
    dim: int = 256
    heads: int = 4
    tied: bool = False
    lr: float = 3e-3
    optimizer: OptimizerName = OptimizerName.ADAMW
    gather_format: str | None = None
    dtype: Dtype = Dtype.FP32
    seed: int = 0
    data: Path | None = None
    checkpoint: Path | None = None
    save_every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "batch", "layers", "dim", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.seq < 2:
            raise ValueError(f"--seq must be at least 2 bytes, got {self.seq}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr must be a positive number, got {self.lr}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must lie in 0..{2**32 - 1}, got {self.seed}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"--dim {self.dim} does not split into --heads {self.heads} of an even size")
        if self.checkpoint is None and (self.resume or self.save_every is not None):
            raise ValueError(f"--{'resume' if self.resume else 'save-every'} needs --checkpoint, the folder to use")
        if self.save_every is not None and self.save_every < 1:
            raise ValueError(f"--save-every must be at least 1, got {self.save_every}")
        if self.batch % self.ranks:
            fitting = -(-self.batch // self.ranks) * self.ranks
            raise ValueError(f"--batch {self.batch} does not divide over {self.ranks} ranks; try --batch {fitting}")
        if self.gather_format is not None and self.engine is not EngineName.VESCALE:
            raise ValueError(f"--gather-format is for --engine vescale; {self.engine} gathers full precision")
        if self.optimizer is OptimizerName.ADAMW8BIT and self.engine is EngineName.FSDP2:
            raise ValueError("--optimizer adamw8bit needs blocks that no rank boundary cuts, which fsdp2 does not plan")
        if self.engine is EngineName.SINGLE and self.ranks != 1:
            raise ValueError(f"--engine single is one process, got {self.ranks} ranks")

    @property
    def formats(self) -> tuple[str, ...]:
        """Block formats that plugins must have registered."""
        state = ("dynamic8_block", "dynamic8_block_unsigned") if self.optimizer is OptimizerName.ADAMW8BIT else ()
        return state if self.gather_format is None else (self.gather_format, *state)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due once `step` steps are done."""
        if self.checkpoint is None:
            return False
        return step == self.steps or (self.save_every is not None and step % self.save_every == 0)

    @property
    def rank_batch(self) -> int:
        """Sequences per rank and step."""
        return self.batch // self.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq
