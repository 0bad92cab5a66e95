"""The bytes of a group's payload and scale planes: of one rank's share, or of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch

from ..layout import Layout
from .block_format import BlockFormat
from .planes import Planes
from .tiling import Tiling

__all__ = ["PlaneMemory", "planes_of"]


@lru_cache(maxsize=64)
def _planes(layout: Layout, tilings: tuple[Tiling, ...], bits: int, scale_nbytes: int) -> Planes:
    return Planes(layout, tilings, bits, scale_nbytes)


def planes_of(format: BlockFormat, layout: Layout, shapes: Sequence[Sequence[int]]) -> Planes:
    """Where payload and scales of tensors of `shapes` lie; equal groups share the answer."""
    tilings = tuple(Tiling(format.block_shape, tuple(shape)) for shape in shapes)
    return _planes(layout, tilings, format.bits, format.scale_dtype.itemsize)


class PlaneMemory:
    """One storage: the payload of every lane, then the scales; on the wire everything is uint8.

    num_shares: 1 for what a rank keeps, the number of ranks for what is gathered.
    memory: uint8 of `PlaneMemory.nbytes(...)`, or None to allocate it.
    """

    def __init__(
        self,
        planes: Planes,
        scale_dtype: torch.dtype,
        device: torch.device,
        *,
        num_shares: int,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.planes = planes
        sizes = [*(num_shares * nbytes for nbytes in planes.payload_nbytes), num_shares * _scale_nbytes(planes)]
        self.nbytes = sum(sizes)
        if memory is None:
            with torch.inference_mode(False):  # memory that is made while serving must still train
                memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.memory = memory
        starts = accumulate(sizes, initial=0)
        *payloads, self.scale_bytes = (
            memory.narrow(0, start, size) for start, size in zip(starts, sizes, strict=False)
        )
        self.payloads = tuple(payloads)
        self.scales = self.scale_bytes.view(scale_dtype)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What is gathered, one call each."""
        return (*self.payloads, self.scale_bytes)

    def payload_of(self, tensor: int, rank: int, *, share: int | None = None) -> torch.Tensor:
        """The bytes that `rank` owns of the tensor, in its share, which is number `share` (`rank` unless given)."""
        lane = self.planes.layout.lane_of[tensor]
        base = (rank if share is None else share) * self.planes.payload_nbytes[lane]
        span = self.planes.local_payload_span(tensor, rank)
        return self.payloads[lane].narrow(0, base + span.begin, len(span))

    def scales_of(self, tensor: int, rank: int, *, share: int | None = None) -> torch.Tensor:
        """The scales that `rank` owns of the tensor."""
        base = (rank if share is None else share) * self.planes.scale_share
        span = self.planes.scale_span(tensor, rank)
        return self.scales.narrow(0, base + span.begin, len(span))

    def whole_payload_of(self, tensor: int) -> torch.Tensor:
        """The tensor's bytes, of all ranks."""
        span = self.planes.payload_span(tensor)
        return self.payloads[self.planes.layout.lane_of[tensor]].narrow(0, span.begin, len(span))

    def alloc(self) -> None:
        # Resize, do not reassign: views of this storage survive.
        storage = self.memory.untyped_storage()
        if storage.size() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)


def _scale_nbytes(planes: Planes) -> int:
    return planes.scale_share * planes.scale_nbytes
