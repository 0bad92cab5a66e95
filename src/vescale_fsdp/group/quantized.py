"""Gathering a group in a block format: each rank encodes its shard, fewer bytes travel, all ranks decode.

    shard --encode--> this rank's slice of both planes --gather in place--> planes --decode--> whole
                      or what it stores, as it is                          or hand over

Master weights keep their dtype; the unsharded parameters hold decoded values, through which gradients pass straight to
the master weights. Encoding needs no message (a shard holds whole blocks), so that the gathered values are the same at
every world size, one rank included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from .. import _torch
from ..formats.block_format import BlockFormat, decode_into, encode_into
from ..formats.plane_memory import PlaneMemory, planes_of
from ..layout import Layout, Span
from ..mesh import DataMesh
from .buffer import DBuffer
from .traffic import Traffic
from .transfer import AllGather, Gathering

__all__ = ["Handed", "QuantizedGather"]


class QuantizedGather:
    """How one group, all of whose parameters are in `format`, is gathered."""

    def __init__(self, layout: Layout, shapes: Sequence[Sequence[int]], format: BlockFormat) -> None:
        self.format = format
        self.shapes = [tuple(shape) for shape in shapes]
        self.planes = planes_of(format, layout, self.shapes)
        self._runs: dict[int, list[_Run]] = {}

    def start(
        self,
        source: DBuffer | PlaneMemory,
        sink: DBuffer | Handed,
        mesh: DataMesh,
        *,
        comm: AllGather | None,
        async_op: bool,
        traffic: Traffic,
    ) -> Gathering:
        """Start to gather; `sink` is filled once the caller has waited.

        `source` is a shard to encode, or what this rank stores encoded; `sink` takes decoded values, or the planes.
        """
        device = sink.flat.device if isinstance(sink, DBuffer) else sink.memory.memory.device
        target = sink.memory if isinstance(sink, Handed) and comm is None else self._temporary(mesh, device, comm)
        gathering = _QuantizedGathering(self, target, sink, traffic)
        with torch.no_grad():
            stored = source if isinstance(source, PlaneMemory) else None
            if stored is None:
                assert isinstance(source, DBuffer)
                self._encode(source, target, mesh.rank)
                traffic.copied_bytes += self.planes.wire_nbytes
            elif mesh.num_ranks == 1 or comm is not None or stored.memory.device != device:
                self._place(stored, target, mesh.rank)
                traffic.copied_bytes += self.planes.wire_nbytes
                stored = None
            if mesh.num_ranks == 1:
                return gathering
            gather_into = _torch.all_gather if comm is None else partial(_call, comm)
            for i, plane in enumerate(target.parts):
                share = plane.numel() // mesh.num_ranks
                mine = plane.narrow(0, mesh.rank * share, share) if stored is None else stored.parts[i]
                work = gather_into(plane, mine, group=mesh.group, async_op=async_op)
                if work is not None:
                    gathering.works.append(work)
                traffic.gathers += 1
                traffic.gathered_bytes += plane.numel()
                traffic.wire_bytes += (mesh.num_ranks - 1) * share
        return gathering

    def memory(self, mesh: DataMesh, device: torch.device) -> PlaneMemory:
        """Planes of all ranks."""
        return PlaneMemory(self.planes, self.format.scale_dtype, device, num_shares=mesh.num_ranks)

    def _temporary(self, mesh: DataMesh, device: torch.device, comm: AllGather | None) -> PlaneMemory:
        """Planes of all ranks for the time of one gather; a user's `comm` allocates what it gathers into."""
        if comm is None:
            return self.memory(mesh, device)
        nbytes = mesh.num_ranks * self.planes.wire_nbytes
        memory = comm.allocate((nbytes,), dtype=torch.uint8, device=device)
        return PlaneMemory(self.planes, self.format.scale_dtype, device, num_shares=mesh.num_ranks, memory=memory)

    def _encode(self, shard: DBuffer, target: PlaneMemory, rank: int) -> None:
        """Encode each local piece straight into this rank's slice of the planes."""
        for i, shape in enumerate(self.shapes):
            piece = shard.view(i)
            if piece.numel():
                piece = piece.to(target.memory.device, non_blocking=True)
                encode_into(self.format, piece, shape, target.payload_of(i, rank), target.scales_of(i, rank))

    def _place(self, stored: PlaneMemory, target: PlaneMemory, rank: int) -> None:
        """Copy what is stored into this rank's slice."""
        for mine, plane in zip(stored.parts, target.parts, strict=True):
            plane.narrow(0, rank * mine.numel(), mine.numel()).copy_(mine, non_blocking=True)

    def decode(self, gathered: PlaneMemory, whole: DBuffer) -> None:
        """Fill every tensor of `whole` from the gathered planes."""
        for i, shape in enumerate(self.shapes):
            if math.prod(shape):
                decode_into(self.format, gathered.whole_payload_of(i), self.scales(i, gathered), shape, whole.view(i))

    def scales(self, tensor: int, gathered: PlaneMemory) -> torch.Tensor:
        """The tensor's scales of all ranks, in block order; a copy where they lie apart."""
        flat = gathered.scales
        pieces = [
            flat.as_strided((run.count, run.length), (run.stride, 1), flat.storage_offset() + run.begin).reshape(-1)
            for run in self._scale_runs(tensor)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else flat.narrow(0, 0, 0)

    def _scale_runs(self, tensor: int) -> list[_Run]:
        """Where the tensor's scales lie in the whole plane; found once, since many ranks may own some."""
        runs = self._runs.get(tensor)
        if runs is None:
            runs = self._runs[tensor] = _merged(self.planes.scale_spans(tensor))
        return runs


@dataclass
class _Run:
    """`count` pieces of `length` scales each, `stride` apart: ranks that own equal shares of a tensor."""

    begin: int
    length: int
    stride: int = 0
    count: int = 1


def _merged(spans: Sequence[Span]) -> list[_Run]:
    runs: list[_Run] = []
    for span in spans:
        last = runs[-1] if runs else None
        step = span.begin - (last.begin + (last.count - 1) * last.stride) if last else 0
        if last is not None and last.length == len(span) and last.stride in (0, step):
            last.stride, last.count = step, last.count + 1
        else:
            runs.append(_Run(span.begin, len(span)))
    return runs


class Handed:
    """Gathered planes that modules compute with: they stay until the group reshards, and views of them survive that."""

    def __init__(self, gather: QuantizedGather, mesh: DataMesh, device: torch.device) -> None:
        self.memory = gather.memory(mesh, device)
        self._gather = gather
        counts = [tiling.num_blocks for tiling in gather.planes.tilings]
        starts = list(accumulate(counts, initial=0))
        with torch.inference_mode(False):
            self._in_order = torch.empty(starts[-1], dtype=gather.format.scale_dtype, device=device)
        self.scales = [self._in_order.narrow(0, start, count) for start, count in zip(starts, counts, strict=False)]
        """Of each tensor, in block order."""
        self._in_order_nbytes = self._in_order.nbytes

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self._in_order_nbytes

    def settle(self, gathered: PlaneMemory) -> None:
        """Take over what was gathered elsewhere, and put each tensor's scales together."""
        if gathered is not self.memory:
            self.memory.memory.copy_(gathered.memory)
        for i, scales in enumerate(self.scales):
            scales.copy_(self._gather.scales(i, self.memory))

    def alloc(self) -> None:
        self.memory.alloc()
        storage = self._in_order.untyped_storage()
        if storage.size() != self._in_order_nbytes:
            storage.resize_(self._in_order_nbytes)

    def free(self) -> None:
        self.memory.free()
        self._in_order.untyped_storage().resize_(0)

    @property
    def guarded(self) -> tuple[torch.Tensor, ...]:
        """Memory that is filled again and again, which autograd must not take for a change."""
        return self.memory.memory, self._in_order


class _QuantizedGathering(Gathering):
    """A gather of planes under way; waiting for it decodes, or hands over."""

    def __init__(self, plan: QuantizedGather, gathered: PlaneMemory, sink: DBuffer | Handed, traffic: Traffic) -> None:
        super().__init__(*((sink.flat,) if isinstance(sink, DBuffer) else sink.guarded))
        self._plan = plan
        self._gathered: PlaneMemory | None = gathered
        self._sink = sink
        self._traffic = traffic

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        if self._gathered is not None:
            with torch.no_grad():
                if isinstance(self._sink, DBuffer):
                    self._plan.decode(self._gathered, self._sink)
                    self._traffic.copied_bytes += self._sink.nbytes
                else:
                    self._sink.settle(self._gathered)
            self._gathered = None  # the group tells the lane, whose stream it was allocated in, that it has been read
        super().wait()


def _call(comm: AllGather, output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return comm(output_tensor=output, input_tensor=source, **kwargs)
