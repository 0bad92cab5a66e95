"""Where payload and scales of a quantised group lie: two planes of equal shares, integers only.

The payload plane has the cut of the group's plan: the bytes of an element lie where the element lies, `bits` for each.
Scales are fewer and do not divide evenly, so their plane has a layout of its own: each rank's scales in plan order,
edge blocks included, filled up to the largest rank's count and to 16 bytes.

    2 ranks, blocks (1, 32), a: 3 rows of 64, b: 1 row of 40, share 128 elements of 8 bits, scales of 1 byte
      payload   |a0 a0 a1 a1|a2 a2 b0 b0 .|      128 bytes a rank
      scales    |4 of a, 12 unused|2 of a, 2 of b, 12 unused|      16 bytes a rank
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..errors import PlanError
from ..layout import Layout, Span
from .tiling import Tiling

__all__ = ["Planes"]

ALIGNMENT_NBYTES = 16


@dataclass(frozen=True)
class Planes:
    """Payload and scale planes of the tensors of one group, all in one format.

    tilings: of each tensor, in plan order.
    bits: of one code. scale_nbytes: of one scale.
    """

    layout: Layout
    tilings: tuple[Tiling, ...]
    bits: int
    scale_nbytes: int

    def __post_init__(self) -> None:
        if len(self.tilings) != len(self.layout.starts):
            raise PlanError(f"expected one tiling per tensor, {len(self.layout.starts)}, got {len(self.tilings)}")
        for lane in self.layout.lanes:
            if lane.share * self.bits % (8 * ALIGNMENT_NBYTES):
                raise PlanError(
                    f"{lane.share} elements of {self.bits} bits are no multiple of {ALIGNMENT_NBYTES} bytes; "
                    f"plan the group with the payload's dtype among those that are aligned"
                )

    @property
    def payload_nbytes(self) -> tuple[int, ...]:
        """Bytes of payload per rank, for each lane."""
        return tuple(lane.share * self.bits // 8 for lane in self.layout.lanes)

    @cached_property
    def scale_share(self) -> int:
        """Scales per rank, unused ones included."""
        most = max(map(sum, zip(*self._counts, strict=True)), default=0)
        unit = ALIGNMENT_NBYTES // self.scale_nbytes
        return -(-most // unit) * unit

    def payload_span(self, tensor: int) -> Span:
        """The tensor's bytes in its lane's whole payload plane, of all ranks one after the other."""
        begin = self.layout.starts[tensor] * self.bits // 8
        return Span(begin, begin - (-self.tilings[tensor].numel * self.bits // 8))

    def local_payload_span(self, tensor: int, rank: int) -> Span:
        """The bytes that `rank` owns of the tensor, in its share of the lane."""
        begin = self.layout.local_offset(tensor, rank) * self.bits // 8
        return Span(begin, begin - (-self._owned(tensor, rank) * self.bits // 8))

    def scale_span(self, tensor: int, rank: int) -> Span:
        """The scales of the tensor in the share of `rank`."""
        begin = self._scale_starts[rank][tensor]
        return Span(begin, begin + self._counts[tensor][rank])

    def scale_spans(self, tensor: int) -> list[Span]:
        """The tensor's scales in the whole scale plane: one run for each rank that owns any, in rank order."""
        share = self.scale_share
        spans = []
        for rank, count in enumerate(self._counts[tensor]):
            if count:
                begin = rank * share + self._scale_starts[rank][tensor]
                spans.append(Span(begin, begin + count))
        return spans

    @property
    def wire_nbytes(self) -> int:
        """Bytes that each rank sends when both planes are gathered."""
        return sum(self.payload_nbytes) + self.scale_share * self.scale_nbytes

    def _owned(self, tensor: int, rank: int) -> int:
        return len(self.layout.shard_range(tensor, self.tilings[tensor].numel, rank))

    @cached_property
    def _counts(self) -> tuple[tuple[int, ...], ...]:
        """Scales of each tensor on each rank."""
        ranks = range(self.layout.num_ranks)
        return tuple(
            tuple(tiling.count(self._owned(tensor, rank)) for rank in ranks)
            for tensor, tiling in enumerate(self.tilings)
        )

    @cached_property
    def _scale_starts(self) -> tuple[tuple[int, ...], ...]:
        """Where each tensor's scales start in the share of each rank."""
        return tuple(tuple(accumulate(column, initial=0)) for column in zip(*self._counts, strict=True))
