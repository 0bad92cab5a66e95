"""Gathering a group in a block format: each rank encodes its shard, fewer bytes travel, all ranks decode.

    shard --encode--> this rank's slice of both planes --gather in place--> planes --decode--> whole

Master weights keep their dtype; the unsharded parameters hold decoded values, through which gradients pass straight to
the master weights. Encoding needs no message (a shard holds whole blocks), so that the gathered values are the same at
every world size, one rank included.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from . import _torch
from .block_format import BlockFormat, decode_into, encode_into
from .buffer import DBuffer
from .mesh import DataMesh
from .plan import GroupPlan
from .planes import Planes
from .tiling import Tiling
from .traffic import Traffic
from .transfer import AllGather, Gathering

__all__ = ["QuantizedGather"]


class QuantizedGather:
    """How one group, all of whose parameters are in `format`, is gathered."""

    def __init__(self, plan: GroupPlan, format: BlockFormat) -> None:
        self.format = format
        self.shapes = [spec.shape for spec in plan.specs]
        tilings = tuple(Tiling(format.block_shape, shape) for shape in self.shapes)
        self.planes = Planes(plan.layout, tilings, format.bits, format.scale_dtype.itemsize)
        self._scale_indices: dict[int, torch.Tensor] = {}

    def start(
        self,
        shard: DBuffer,
        whole: DBuffer,
        mesh: DataMesh,
        *,
        comm: AllGather | None,
        async_op: bool,
        traffic: Traffic,
    ) -> Gathering:
        """Encode `shard` and start to gather; `whole` is filled once the caller has waited."""
        buffers = _PlaneBuffers(self.planes, self.format.scale_dtype, whole.flat.device, comm)
        gathering = _QuantizedGathering(self, buffers, whole, traffic)
        with torch.no_grad():
            self._encode(shard, buffers, mesh.rank)
            traffic.copied_bytes += self.planes.wire_nbytes
            if mesh.num_ranks == 1:
                return gathering
            gather_into = _torch.all_gather if comm is None else partial(_call, comm)
            for plane in (*buffers.payloads, buffers.scale_bytes):
                share = plane.numel() // mesh.num_ranks
                mine = plane.narrow(0, mesh.rank * share, share)
                work = gather_into(plane, mine, group=mesh.group, async_op=async_op)
                if work is not None:
                    gathering.works.append(work)
                traffic.gathers += 1
                traffic.gathered_bytes += plane.numel()
                traffic.wire_bytes += (mesh.num_ranks - 1) * share
        return gathering

    def _encode(self, shard: DBuffer, buffers: _PlaneBuffers, rank: int) -> None:
        """Encode each local piece straight into this rank's slice of the planes."""
        lane_of = self.planes.layout.lane_of
        for i, shape in enumerate(self.shapes):
            piece = shard.view(i)
            if not piece.numel():
                continue
            payload, scales = self.planes.local_payload_span(i, rank), self.planes.scale_span(i, rank)
            encode_into(
                self.format,
                piece.to(buffers.scales.device, non_blocking=True),
                shape,
                buffers.payload_of(lane_of[i], rank)[payload.begin : payload.end],
                buffers.scales_of(rank)[scales.begin : scales.end],
            )

    def decode(self, buffers: _PlaneBuffers, whole: DBuffer) -> None:
        """Fill every tensor of `whole` from the gathered planes."""
        lane_of = self.planes.layout.lane_of
        for i, shape in enumerate(self.shapes):
            if not math.prod(shape):
                continue
            span = self.planes.payload_span(i)
            payload = buffers.payloads[lane_of[i]][span.begin : span.end]
            scales = buffers.scales.index_select(0, self._scale_index(i, buffers.scales.device))
            decode_into(self.format, payload, scales, shape, whole.view(i))

    def _scale_index(self, tensor: int, device: torch.device) -> torch.Tensor:
        """Where the tensor's scales lie in the whole plane; made once, since there is a run for each of many ranks."""
        index = self._scale_indices.get(tensor)
        if index is None or index.device != device:
            runs = [torch.arange(run.begin, run.end, dtype=torch.int32) for run in self.planes.scale_spans(tensor)]
            with torch.inference_mode(False):
                index = self._scale_indices[tensor] = torch.cat(runs).to(device)
        return index


class _PlaneBuffers:
    """Memory of both planes of all ranks, for the time of one gather. On the wire everything is uint8."""

    def __init__(self, planes: Planes, dtype: torch.dtype, device: torch.device, comm: AllGather | None) -> None:
        num_ranks = planes.layout.num_ranks
        self._planes = planes
        lanes = [num_ranks * nbytes for nbytes in planes.payload_nbytes]
        sizes = [*lanes, num_ranks * planes.scale_share * planes.scale_nbytes]
        with torch.inference_mode(False):
            if comm is None:
                memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            else:
                memory = comm.allocate((sum(sizes),), dtype=torch.uint8, device=device)
        *payloads, self.scale_bytes = (
            memory.narrow(0, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        )
        self.memory = memory
        self.payloads = tuple(payloads)
        self.scales = self.scale_bytes.view(dtype)

    def payload_of(self, lane: int, rank: int) -> torch.Tensor:
        share = self._planes.payload_nbytes[lane]
        return self.payloads[lane].narrow(0, rank * share, share)

    def scales_of(self, rank: int) -> torch.Tensor:
        share = self._planes.scale_share
        return self.scales.narrow(0, rank * share, share)


class _QuantizedGathering(Gathering):
    """A gather of planes under way; waiting for it decodes."""

    def __init__(self, plan: QuantizedGather, buffers: _PlaneBuffers, whole: DBuffer, traffic: Traffic) -> None:
        super().__init__(whole)
        self._plan = plan
        self._buffers: _PlaneBuffers | None = buffers
        self._whole = whole
        self._traffic = traffic

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        if self._buffers is not None:
            with torch.no_grad():
                self._plan.decode(self._buffers, self._whole)
            self._traffic.copied_bytes += self._whole.nbytes
            if self._buffers.memory.is_cuda:
                # Allocated on the gather's stream, read on this one: not to be reused before this one is done.
                self._buffers.memory.record_stream(torch.cuda.current_stream())
            self._buffers = None
        super().wait()


def _call(comm: AllGather, output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return comm(output_tensor=output, input_tensor=source, **kwargs)
