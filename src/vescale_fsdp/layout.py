"""Where the tensors of one communication group lie, by position: integers only, shared by all equal groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragged_dtensor.units import Units

from .errors import PlanError

__all__ = ["LanePlan", "Layout", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open run of elements, [begin, end)."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise PlanError(f"a span runs forward from >= 0, got [{self.begin}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.begin

    def __and__(self, other: Span) -> Span:
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One flat buffer with an equal share on every rank.

    `share` elements per rank; no layout of this lane's tensors has a share below `bound`.
    """

    share: int
    bound: int

    def __post_init__(self) -> None:
        if not 0 <= self.bound <= self.share:
            raise PlanError(
                f"a lane's share is at least its lower bound, got share {self.share} and bound {self.bound}"
            )

    @property
    def proved(self) -> bool:
        """No layout of these tensors in one buffer is smaller."""
        return self.share == self.bound


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor i starts at element `starts[i]` of lane `lane_of[i]`, a buffer of num_ranks equal shares in rank order.

    Shares are multiples of `unit`, starts of `align`. `bound` is the least share per rank that any layout could have,
    in one buffer or many.

        num_ranks=2, share=8, starts=(0, 12), numels=(10, 4):
          rank 0 |aaaaaaaa|  rank 1 |aa..bbbb|
    """

    num_ranks: int
    unit: int
    align: int
    lanes: tuple[LanePlan, ...]
    lane_of: tuple[int, ...]
    starts: tuple[int, ...]
    bound: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.unit < 1 or self.align < 1:
            raise PlanError(f"num_ranks, unit and align are >= 1, got {self.num_ranks}, {self.unit} and {self.align}")
        if not self.lanes or len(self.lane_of) != len(self.starts):
            raise PlanError(
                f"a layout has a lane and one start per tensor, got {len(self.lanes)} lanes, "
                f"{len(self.lane_of)} lane numbers and {len(self.starts)} starts"
            )

    @property
    def share(self) -> int:
        """Elements per rank, all lanes together."""
        return sum(lane.share for lane in self.lanes)

    @property
    def proved(self) -> bool:
        """No layout is smaller: none in one buffer if this has one lane, none at all if it has more."""
        return self.share == self.bound or (len(self.lanes) == 1 and self.lanes[0].proved)

    def shard_range(self, tensor: int, numel: int, rank: int) -> Span:
        """Elements of the flattened tensor that `rank` owns."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank {rank} is not one of {self.num_ranks}")
        share = self.lanes[self.lane_of[tensor]].share
        begin = rank * share - self.starts[tensor]
        return Span(min(max(begin, 0), numel), min(max(begin + share, 0), numel))

    def local_offset(self, tensor: int, rank: int) -> int:
        """Where the elements of `shard_range` lie inside the rank's share of the lane."""
        share = self.lanes[self.lane_of[tensor]].share
        return min(max(self.starts[tensor] - rank * share, 0), share)

    def units(self, tensor: int, numel: int) -> Units:
        """Elements per rank, as runs: zeros, the first piece, full shares, the last piece, zeros."""
        if numel == 0:
            return Units.from_runs(((1, 1), (0, self.num_ranks - 1)))
        share = self.lanes[self.lane_of[tensor]].share
        start = self.starts[tensor]
        first, last = start // share, (start + numel - 1) // share
        if first == last:
            return Units.from_runs(((0, first), (1, 1), (0, self.num_ranks - 1 - last)))
        head, tail = (first + 1) * share - start, start + numel - last * share
        runs = ((0, first), (head, 1), (share, last - first - 1), (tail, 1), (0, self.num_ranks - 1 - last))
        return Units.from_runs(runs)

    def check(self, names: Sequence[object], numels: Sequence[int], granularities: Sequence[int]) -> None:
        """Raise PlanError unless every rule of the problem holds. Knows nothing of how the layout was found."""
        if not len(names) == len(numels) == len(granularities) == len(self.starts):
            raise PlanError(f"the layout places {len(self.starts)} tensors, the group has {len(names)}")
        for lane in self.lanes:
            if lane.share % self.unit or lane.share % self.align:
                raise PlanError(f"share {lane.share} is no multiple of unit {self.unit} and alignment {self.align}")
        for i, numel in enumerate(numels):
            if not numel:
                self._check_tensor(names[i], self.lane_of[i], self.starts[i], 0, granularities[i])
        placed = sorted((self.lane_of[i], self.starts[i], i) for i, numel in enumerate(numels) if numel > 0)
        previous_lane, previous_end = -1, 0
        previous_name: object = ""
        for lane_index, start, i in placed:
            if lane_index != previous_lane:
                previous_lane, previous_end, previous_name = lane_index, 0, "the start of the buffer"
            if start < previous_end:
                raise PlanError(f"{names[i]}: starts at {start}, but {previous_name} ends at {previous_end}")
            self._check_tensor(names[i], lane_index, start, numels[i], granularities[i])
            previous_end, previous_name = start + numels[i], names[i]

    def _check_tensor(self, name: object, lane_index: int, start: int, numel: int, granularity: int) -> None:
        if not 0 <= lane_index < len(self.lanes):
            raise PlanError(f"{name}: lies in lane {lane_index}, but there are {len(self.lanes)}")
        share = self.lanes[lane_index].share
        end = start + numel
        if start < 0 or start % self.align:
            raise PlanError(f"{name}: starts at {start}, which is no multiple of {self.align}")
        if end > self.num_ranks * share:
            raise PlanError(f"{name}: ends at {end}, behind the {self.num_ranks} x {share} elements of its lane")
        if not numel:
            return
        cut = (start // share + 1) * share
        if cut < end and (cut - start) % granularity:
            raise PlanError(f"{name}: cut after {cut - start} elements, which splits a block of {granularity}")
        if cut + share < end and share % granularity:
            raise PlanError(f"{name}: cut every {share} elements, which splits a block of {granularity}")
