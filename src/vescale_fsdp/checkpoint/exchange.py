"""Many tensors from one cut to another at once: one all-to-all for all that travel along the same mesh axis.

    rank 0 sends     | a for 0, b for 0 | a for 1, b for 1 |
    and receives     | a from 0, b from 0 | a from 1, b from 1 |

What is under way is this rank's share of the tensors, once where it is sent from and once where it arrives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ragged_dtensor import RaggedShard
from ragged_dtensor.collectives import Axis
from ragged_dtensor.ownership import coordinate_of
from ragged_dtensor.redistribute import pack, unpack
from ragged_dtensor.transition import Movement, find_movements

from .. import _torch

__all__ = ["exchange_locals"]


@dataclass(frozen=True)
class _Parcel:
    """A tensor whose elements only change rank along one axis: `index` is its place among the caller's."""

    index: int
    movement: Movement
    local: torch.Tensor


def exchange_locals(tensors: Sequence[DTensor], targets: Sequence[tuple[Placement, ...]]) -> list[torch.Tensor]:
    """The local tensors that `tensors` have under the placements `targets`; every rank of their mesh calls it.

    Never a whole tensor where both cuts are of the same axis.
    """
    results: list[torch.Tensor | None] = [None] * len(tensors)
    parcels: dict[tuple[DeviceMesh, int, torch.dtype], list[_Parcel]] = defaultdict(list)
    for index, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        movement = _only_movement(tensor, target)
        if movement is None:
            results[index] = _torch.local_of(tensor.redistribute(placements=target)).detach()
        else:
            key = tensor.device_mesh, movement.step.axis, tensor.dtype
            parcels[key].append(_Parcel(index, movement, _torch.local_of(tensor).detach().contiguous()))
    for (mesh, axis, _), same in parcels.items():
        for parcel, local in zip(same, _exchange(Axis(mesh, axis), same), strict=True):
            results[parcel.index] = local
    return [local for local in results if local is not None]


def _only_movement(tensor: DTensor, target: tuple[Placement, ...]) -> Movement | None:
    """The movement between two shardings of one axis, if that is all there is to do."""
    mesh, source = tensor.device_mesh, tensor.placements
    changed = [axis for axis, (old, new) in enumerate(zip(source, target, strict=True)) if old != new]
    if len(changed) != 1 or not {type(source[changed[0]]), type(target[changed[0]])} <= {Shard, RaggedShard}:
        return None
    _, movements = find_movements(tuple(tensor.shape), source, target, tuple(mesh.shape), coordinate_of(mesh))
    return movements[0] if len(movements) == 1 else None


def _exchange(axis: Axis, parcels: Sequence[_Parcel]) -> list[torch.Tensor]:
    """One all-to-all: for each peer, the parts of all parcels in order."""
    sent = [parcel.movement.transfer.send.splits for parcel in parcels]
    received = [parcel.movement.transfer.receive.splits for parcel in parcels]
    packed = [
        torch.split(pack(parcel.local, parcel.movement.transfer.send), list(splits))
        for parcel, splits in zip(parcels, sent, strict=True)
    ]
    peers = range(axis.size)
    wire = torch.cat([parts[peer] for peer in peers for parts in packed])
    del packed
    totals = [[sum(splits[peer] for splits in each) for peer in peers] for each in (received, sent)]
    arrived = axis.exchange(wire, received=totals[0], sent=totals[1])
    del wire
    pieces = iter(torch.split(arrived, [splits[peer] for peer in peers for splits in received]))
    by_peer = [[next(pieces) for _ in parcels] for _ in peers]
    return [
        unpack(torch.cat([row[i] for row in by_peer]), parcel.movement.transfer.receive, parcel.movement.result)
        for i, parcel in enumerate(parcels)
    ]
