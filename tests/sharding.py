"""A full tensor as a DTensor whose local tensors are cut by hand, without any collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.optim.holdings import piece_at

__all__ = ["shard"]


def shard(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    piece = piece_at(tuple(full.shape), placements, tuple(mesh.shape), tuple(coordinate))
    local = full
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        local = local.narrow(dim, offset, size)
    if piece.num_flat is not None:
        local = local.flatten(0, piece.num_flat - 1)[piece.begin : piece.end]
    return DTensor.from_local(
        local.clone().contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
