"""The collectives that move ragged shards: flat tensors and element counts in, flat tensors out.

All go through torch's functional collectives, so that they can be traced and counted (`CommDebugMode`) and return
`AsyncCollectiveTensor`s, which wait when they are first used. No backend has to take an unequal list all-gather, which
gloo refuses: shards of unequal size travel padded to the largest, or as one broadcast per owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ragged_dtensor import _torch
from ragged_dtensor._torch import wait

# What gloo takes; everything else (float8, complex, int16) travels as bytes.
WIRE_DTYPES = {
    torch.bfloat16,
    torch.bool,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
}


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis of a mesh, of which this process is one."""

    mesh: DeviceMesh
    axis: int

    @property
    def size(self) -> int:
        return self.mesh.size(self.axis)

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank(self.axis)

    def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Equal shards, one after the other."""
        wire = _torch.all_gather(_as_wire(flat), (self.mesh, self.axis))
        return wire if wire.dtype == flat.dtype else wait(wire).view(flat.dtype)

    def all_gather_unequal(self, flat: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
        """Shards of `numels` elements, one after the other without gaps."""
        total, longest = sum(numels), max(numels)
        if _suits_one_call_per_owner(numels, flat.element_size()):
            return self._broadcast_each(flat, numels)
        padded = flat.new_empty(longest)
        padded[: flat.numel()] = flat
        gathered = wait(self.all_gather(padded)).view(len(numels), longest)
        whole = flat.new_empty(total)
        for part, row, numel in zip(_torch.split(whole, numels), gathered, numels, strict=True):
            part.copy_(row[:numel])
        return whole

    def _broadcast_each(self, flat: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
        whole = flat.new_empty(sum(numels))
        parts = _torch.split(whole, numels)
        parts[self.rank].copy_(flat)
        for rank, part in enumerate(parts):
            if part.numel():
                self._broadcast_(part, rank)
        return _torch.wait_in_place(whole)

    def broadcast(self, flat: torch.Tensor, source: int, numel: int) -> torch.Tensor:
        """The `numel` elements of rank `source` of the axis, in new memory on every rank."""
        whole = flat.clone() if self.rank == source else flat.new_empty(numel)
        self._broadcast_(whole, source)
        return _torch.wait_in_place(whole)

    def _broadcast_(self, flat: torch.Tensor, source: int) -> None:
        _torch.broadcast_(_as_wire(flat), source, self.mesh.get_group(self.axis))

    def exchange(self, flat: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Send `sent[j]` elements to rank j, in order, and receive `received[i]` from rank i, in order."""
        wire = _as_wire(flat)
        scale = flat.element_size() // wire.element_size()
        splits = ([n * scale for n in received], [n * scale for n in sent])
        out = _torch.all_to_all(wire, *splits, (self.mesh, self.axis))
        return out if out.dtype == flat.dtype else wait(out).view(flat.dtype)

    def reduce_scatter(self, flat: torch.Tensor, reduce_op: str) -> torch.Tensor:
        """The `rank`-th of `size` equal shares of the reduced tensor."""
        return _torch.reduce_scatter(flat, reduce_op, (self.mesh, self.axis))

    def all_reduce(self, local: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return _torch.all_reduce(local, reduce_op, (self.mesh, self.axis))

    def reduce_scatter_unequal(self, flat: torch.Tensor, numels: Sequence[int], reduce_op: str) -> torch.Tensor:
        """This rank's share of the reduced tensor, cut into `numels`."""
        longest = max(numels)
        if _suits_one_call_per_owner(numels, flat.element_size()) and not torch.compiler.is_compiling():
            return self._reduce_each(flat, numels, reduce_op)
        padded = flat.new_zeros(len(numels), longest)
        for part, row, numel in zip(_torch.split(flat, numels), padded, numels, strict=True):
            row[:numel].copy_(part)
        return wait(self.reduce_scatter(padded.flatten(), reduce_op))[: numels[self.rank]].clone()

    def _reduce_each(self, flat: torch.Tensor, numels: Sequence[int], reduce_op: str) -> torch.Tensor:
        group = self.mesh.get_group(self.axis)
        parts = _torch.split(flat.clone(), numels)  # reducing is in place, on the ranks that send as well
        works = [_torch.reduce_(part, reduce_op, rank, group) for rank, part in enumerate(parts) if part.numel()]
        for work in works:
            work.wait()
        mine = parts[self.rank].clone()  # not a view, which would keep the memory of all parts
        return mine.div_(self.size) if reduce_op == "avg" else mine


# With shares of at least this many bytes on average, or more padding than data, one call per owner beats padding.
LARGE_SHARE_NBYTES = 1 << 20


def _suits_one_call_per_owner(numels: Sequence[int], itemsize: int) -> bool:
    num_owners, total = sum(map(bool, numels)), sum(numels)
    return total * itemsize >= LARGE_SHARE_NBYTES * num_owners or max(numels) * len(numels) > 2 * total


def _as_wire(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.dtype in WIRE_DTYPES else flat.view(torch.uint8)
