"""Distributed checkpoints of ragged tensors: each rank writes and reads the boxes of its piece."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_dtensor import _torch
from ragged_dtensor.errors import RaggedShardError


def write_items(dtensor: DTensor, fqn: str) -> list[Any]:
    """One WriteItem per box of this rank's piece (`ownership.local_piece(...).boxes()`)."""
    raise RaggedShardError(f"{fqn}: checkpoints of {dtensor.placements} are not supported. Redistribute first.")


def chunk_list(dtensor: DTensor) -> list[Any]:
    """One ChunkStorageMetadata per box of this rank's piece; empty pieces give no chunk."""
    raise RaggedShardError(f"Checkpoints of {dtensor.placements} are not supported. Redistribute first.")


def tensor_shard(dtensor: DTensor, index: Any) -> torch.Tensor:
    """The part of the local tensor that `index` (a MetadataIndex with the offset of one box) names, as a view."""
    raise RaggedShardError(f"Checkpoints of {dtensor.placements} are not supported. Redistribute first.")


_torch.seams.write_items = write_items
_torch.seams.chunk_list = chunk_list
_torch.seams.tensor_shard = tensor_shard
