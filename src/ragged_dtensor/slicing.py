"""This rank's part of a tensor that it holds whole."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ragged_dtensor._torch import Placement
from ragged_dtensor.layout import Piece
from ragged_dtensor.ownership import local_piece


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
    return part_of(full, local_piece(tuple(full.shape), placements, mesh))
