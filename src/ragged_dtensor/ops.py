"""Which ops a ragged tensor takes: one rule per kind of op, and an error for everything else."""

from __future__ import annotations

from typing import Any

from ragged_dtensor import _torch
from ragged_dtensor.errors import UnsupportedOpError


def answer(op: Any, args: tuple[object, ...], kwargs: dict[str, object], op_info: Any) -> Any:
    """What torch gets for an op of which at least one operand is ragged: a sharding, which it caches, or the result."""
    raise UnsupportedOpError(f"{op} has no rule for ragged operands: {op_info.schema}. Redistribute first.")


_torch.seams.answer = answer
