"""What is trained per step: the model's groups in running order, tokens, dtypes, which parameters a token meets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..errors import VescaleError
from ..shapes import ModelShapes, ShapeGroup
from ..spec import ParamSpec, itemsize_bits

__all__ = ["Workload"]

LOOKED_UP = ("*embed*", "*wte*", "*wpe*", "*tok.*", "*tokens*")


@dataclass(frozen=True)
class Workload:
    """One step of a rank.

    tokens: per rank. compute_dtype, reduce_dtype: of gathered parameters and of reductions; at rest they are float32,
        with two moments of AdamW.
    active: share of a tensor's elements that each token is multiplied with, by pattern of its name: 4 of 128 experts
        are 1/32. Embeddings, which are looked up, and vectors count nothing; the last pattern that matches wins.
    checkpointed: whether backward computes each layer's forward again.
    activation_bytes: what activations take at the fullest moment.
    """

    shapes: ModelShapes
    tokens: int
    compute_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    active: Mapping[str, float] = field(default_factory=dict)
    checkpointed: bool = True
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise VescaleError(f"tokens: expected a whole number >= 1, got {self.tokens}")
        if self.activation_bytes < 0:
            raise VescaleError(f"activation_bytes: expected a number >= 0, got {self.activation_bytes}")
        for pattern, share in self.active.items():
            if not 0 <= share <= 1:
                raise VescaleError(f"active {pattern}: expected a share between 0 and 1, got {share}")
            if not any(fnmatchcase(spec.fqn, pattern) for spec in self.shapes.specs):
                raise VescaleError(f"active {pattern}: no parameter of {self.shapes.model} has such a name")

    @property
    def compute_bytes(self) -> int:
        """Per element of a gathered parameter."""
        return itemsize_bits(self.compute_dtype) // 8

    @property
    def reduce_bytes(self) -> int:
        return itemsize_bits(self.reduce_dtype) // 8

    @property
    def model_flops(self) -> float:
        """Of forward and backward, without what is computed again: 6 per active parameter and token."""
        return 3 * sum(self.forward_flops(group) * group.count for group in self.shapes.groups)

    def forward_flops(self, group: ShapeGroup) -> float:
        """Of one copy of a group: 2 per active parameter and token."""
        return 2 * self.tokens * sum(math.prod(spec.shape) * self._share(spec) for spec in group.specs)

    def _share(self, spec: ParamSpec) -> float:
        found = [share for pattern, share in self.active.items() if fnmatchcase(spec.fqn, pattern)]
        if found:
            return found[-1]
        is_multiplied = len(spec.shape) > 1 and not any(fnmatchcase(spec.fqn, pattern) for pattern in LOOKED_UP)
        return 1.0 if is_multiplied else 0.0
