"""This rank's part of a tensor that it holds whole."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ragged_dtensor import _torch
from ragged_dtensor._torch import Placement
from ragged_dtensor.boxes import Nest
from ragged_dtensor.layout import Piece
from ragged_dtensor.ownership import coordinate_of, local_piece


def part_of(full: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of `piece`, in the shape of a local tensor; a view of `full` where one box of it says it all.

    Works on expanded tensors without making them whole.
    """
    parts = [
        full[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]
        for box in piece.boxes()
    ]
    if not parts:
        return full.new_empty(piece.local_shape)
    if len(parts) == 1:
        return parts[0].reshape(piece.local_shape)
    return torch.cat([part.reshape(-1) for part in parts]).view(piece.local_shape)


def local_part(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """What this rank owns of `full` under `placements`; a view where possible."""
    if not _torch.has_strided_shard(placements):
        return part_of(full, local_piece(tuple(full.shape), placements, mesh))
    nest = Nest.of(tuple(full.shape), placements, tuple(mesh.shape), coordinate_of(mesh))
    part = full
    for dim, runs in enumerate(nest.runs):
        parts = [part.narrow(dim, begin, size) for begin, size in runs or [(0, 0)]]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return part_of(part, nest.piece)
