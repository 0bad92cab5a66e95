"""Ragged shards: DTensors whose ranks own unequal, contiguous shares of a tensor.

Reading order; a file imports only what stands before it:

    errors granularity units layout seams _torch op_seams movement_seams checkpoint_seams placement ownership
    boxes collectives transition redistribute distribute slicing op_call agreement elementwise views new_tensor
    contributions along_dim reductions whole random ops checkpoint

Importing changes nothing in torch. The first RaggedShard that is built installs the seams (`_torch.register`).
"""

from ragged_dtensor import op_seams, movement_seams, checkpoint_seams  # noqa: F401, I001  (they install the seams)
from ragged_dtensor import checkpoint, ops, ownership, redistribute  # noqa: F401  (they fill the seams)
from ragged_dtensor.distribute import distribute_tensor, from_local
from ragged_dtensor.errors import (
    LayoutError,
    RaggedShardError,
    UnsupportedOpError,
    UnsupportedTorchError,
    UnsupportedTransitionError,
)
from ragged_dtensor.granularity import Granularity
from ragged_dtensor.placement import RaggedShard, StridedRaggedShard
from ragged_dtensor.random import init_full
from ragged_dtensor.units import Units

__all__ = [
    "Granularity",
    "LayoutError",
    "RaggedShard",
    "RaggedShardError",
    "StridedRaggedShard",
    "Units",
    "UnsupportedOpError",
    "UnsupportedTorchError",
    "UnsupportedTransitionError",
    "distribute_tensor",
    "from_local",
    "init_full",
]
