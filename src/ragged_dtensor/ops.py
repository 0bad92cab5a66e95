"""Which ops a ragged tensor takes: one rule per kind of op, and an error for everything else."""

from __future__ import annotations

from ragged_dtensor import _torch
from ragged_dtensor._torch import OpSchema, OutputSharding
from ragged_dtensor.errors import UnsupportedOpError


def propagate(op_schema: OpSchema) -> OutputSharding:
    """The sharding of the op's results, given specs of all operands of which at least one is ragged.

    Called once per distinct schema; torch caches the answer in C++. The result carries `output_spec` with tensor meta
    (`_torch.propagate_tensor_meta`). Raise UnsupportedOpError for anything else: errors of other types lose their type
    on the way. Some ops lie about being local: `x << n` (`aten.__lshift__`) on any DTensor returns x unchanged.
    """
    raise UnsupportedOpError(f"{op_schema.op} has no rule for ragged operands: {op_schema}. Redistribute first.")


_torch.seams.propagate = propagate
