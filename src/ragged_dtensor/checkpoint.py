"""Distributed checkpoints of ragged tensors: each rank writes and reads the boxes of its piece.

A shard that begins and ends inside a row is up to 2 * ndim - 1 boxes. (3, 4) cut flat into 5 + 7 elements:

    rank 0 writes   (0, 0)+(1, 4)   (1, 0)+(1, 1)
    rank 1 writes   (1, 1)+(1, 3)   (2, 0)+(1, 4)

Boxes say where they lie in the full tensor, so that any other cut, world size or placement can read them. Planning and
writing need no collective of ours. Replicas write the same boxes under the same names, of which DCP keeps one each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from ragged_dtensor import _torch
from ragged_dtensor.boxes import HeldBox, held_boxes
from ragged_dtensor.errors import RaggedShardError
from ragged_dtensor.layout import Shape
from ragged_dtensor.op_call import is_participating
from ragged_dtensor.ownership import Placements, coordinate_of
from ragged_dtensor.slicing import local_part


def write_items(dtensor: DTensor, fqn: str) -> list[Any]:
    """One WriteItem per box of this rank's piece."""
    properties, size = TensorProperties.create_from_tensor(_torch.local_of(dtensor)), dtensor.size()
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in _held(dtensor, fqn).chunks
    ]


def chunk_list(dtensor: DTensor) -> list[Any]:
    """One ChunkStorageMetadata per box of this rank's piece."""
    return list(_held(dtensor).chunks)


def tensor_shard(dtensor: DTensor, index: Any) -> torch.Tensor:
    """The box that begins where `index` (a MetadataIndex) says, as a view: loading writes into it."""
    local = _torch.local_of(dtensor)
    if not local.is_contiguous():
        raise RaggedShardError(
            f"{index.fqn}: the local tensor of shape {tuple(local.shape)} and stride {local.stride()} is not "
            "contiguous, so its boxes are no views of it. Make it contiguous first."
        )
    held = _held(dtensor, index.fqn)
    box = held.first if index.offset is None else held.by_offset.get(index.offset)
    if box is None:
        raise RaggedShardError(
            f"{index.fqn}: this rank has no box at {index.offset}, only those at {list(held.by_offset)} of "
            f"{list(dtensor.placements)}."
        )
    if box.strides == _torch.contiguous_stride(box.sizes):
        return _alone(local.view(-1)[box.start : box.start + math.prod(box.sizes)].view(box.sizes))
    return local.as_strided(box.sizes, box.strides, local.storage_offset() + box.start)


def _alone(view: torch.Tensor) -> torch.Tensor:
    """The same memory behind a storage of its own: DCP copies a view of a larger storage before it writes it.

    On the CPU alone, and not for complex numbers and subclasses.
    """
    if type(view) is not torch.Tensor or view.device.type != "cpu" or view.is_complex() or not view.numel():
        return view
    if view.untyped_storage().nbytes() == view.nbytes:
        return view
    return torch.from_numpy(view.detach().reshape(-1).view(torch.uint8).numpy()).view(view.dtype).view(view.shape)


@dataclass(frozen=True, eq=False)
class _Held:
    """What a rank holds of all tensors of one layout: parameters share it with their optimizer state."""

    chunks: tuple[ChunkStorageMetadata, ...]
    by_offset: dict[tuple[int, ...], HeldBox]

    @property
    def first(self) -> HeldBox | None:
        return next(iter(self.by_offset.values()), None)


def _held(dtensor: DTensor, fqn: str = "tensor") -> _Held:
    placements, mesh = dtensor.placements, dtensor.device_mesh
    if any(isinstance(placement, Partial) for placement in placements):
        raise RaggedShardError(
            f"{fqn}: placed as {list(placements)}, it is still to be reduced. Redistribute before saving."
        )
    if not is_participating(mesh):
        return _Held((), {})
    return _held_of(tuple(dtensor.shape), tuple(placements), tuple(mesh.shape), coordinate_of(mesh))


@functools.lru_cache(maxsize=16384)
def _held_of(shape: Shape, placements: Placements, mesh: Shape, coordinate: Shape) -> _Held:
    """A tensor without elements is one empty box on every rank, so that its name is not lost."""
    boxes = held_boxes(shape, placements, mesh, coordinate)
    if not math.prod(shape):
        boxes = (HeldBox((0,) * len(shape), shape, 0, _torch.contiguous_stride(shape)),)
    chunks = tuple(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes)
    return _Held(chunks, {box.offsets: box for box in boxes})


def place_full(dtensor: DTensor, full: torch.Tensor) -> DTensor:
    """`dtensor` with the values of a full tensor that this rank holds; a new one if it is on the meta device."""
    if tuple(full.shape) != tuple(dtensor.shape):
        raise RaggedShardError(f"Expected a full tensor of shape {tuple(dtensor.shape)}, got {tuple(full.shape)}.")
    part = local_part(full.detach(), dtensor.device_mesh, tuple(dtensor.placements))
    if dtensor.is_meta:
        # In memory of its own: what stays must not keep the full tensor alive.
        return _torch.new_dtensor(_in_memory(part, _torch.local_of(dtensor)), dtensor._spec, requires_grad=False)
    _torch.local_of(dtensor).detach().copy_(part)
    return dtensor


def place_together(flat: torch.Tensor) -> None:
    """Full tensors that are placed where views of `flat`, on the meta device, were share one memory, laid out as it.

    Who takes that memory over (`take_memory`) never holds its shards twice.
    """
    vars(flat.untyped_storage())[_MEMORY] = None


def take_memory(local: torch.Tensor) -> torch.Tensor | None:
    """The whole memory, flat, in which `local` was placed with others; None if there is none, or somebody has it."""
    storage = local.untyped_storage()
    if vars(storage).pop(_TAKE, None) is None:
        return None
    return local.new_empty(0).set_(storage)


_MEMORY, _TAKE = "ragged_memory", "ragged_take"
"""Kept with a storage, which all views of it share: the memory that replaces it, and that it may be taken."""


def _in_memory(part: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A copy of `part`, which is to take the place of `local`."""
    facts = vars(local.untyped_storage()) if type(local) is torch.Tensor else {}
    if _MEMORY not in facts or part.dtype != local.dtype or not part.numel():
        return part.clone()
    memory: torch.Tensor | None = facts[_MEMORY]
    if memory is None or memory.device != part.device:
        memory = part.new_empty(local.untyped_storage().nbytes() // local.itemsize)
        facts[_MEMORY] = memory
        vars(memory.untyped_storage())[_TAKE] = True
    return memory.as_strided(local.shape, local.stride(), local.storage_offset()).copy_(part.view(local.shape))


def shard_like(param: DTensor, full: torch.Tensor, name: str) -> DTensor:
    """A full tensor that every rank holds as a DTensor placed as `param`, in memory of its own."""
    if full.shape != param.shape:
        raise RaggedShardError(
            f"{name}: expected the parameter's shape {tuple(param.shape)}, or a DTensor placed as it is, got a tensor "
            f"of shape {tuple(full.shape)}. Load the state of an optimizer of the same parameters in the same order."
        )
    part = local_part(full.detach(), param.device_mesh, tuple(param.placements)).clone()
    meta = _torch.TensorMeta(param.size(), param.stride(), full.dtype)
    spec = _torch.DTensorSpec(param.device_mesh, tuple(param.placements), tensor_meta=meta)
    return _torch.new_dtensor(part, spec, requires_grad=False)


_torch.seams.write_items = write_items
_torch.seams.chunk_list = chunk_list
_torch.seams.tensor_shard = tensor_shard
_torch.seams.place_full = place_full
_torch.seams.shard_like = shard_like
