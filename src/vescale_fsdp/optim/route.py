"""How whole matrices travel to their owners and back: who sends which run to whom, in which bucket. Integers only.

A matrix travels one mesh axis at a time. On a (2 x dp_shard, 2 x tp) mesh the runs of a matrix whose owner is (1, 0) go

    hop tp        (0,1) -> (0,0)    (1,1) -> (1,0)      along tp, to the owner's tp coordinate
    hop dp_shard  (0,0) -> (1,0)                        along dp_shard, to the owner

and the result goes back the same way in reverse. On an axis where the tensor is replicated nothing is sent out (the
replica that owns the matrix has everything), and the result goes to all replicas. All matrices of a bucket that move
along an axis share one all-to-all, so that a step costs two collectives per bucket and axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .holdings import Holding
from .matrices import Matrix

__all__ = ["Bucket", "Loan", "Message", "Route"]

Coordinate = tuple[int, ...]
Place = tuple[str, Coordinate]  # what is limited ("sends out", "computes", ...) and at which rank


@dataclass(frozen=True)
class Loan:
    """One matrix, who owns it for the step, and what every rank holds of it; coordinates count the hopped axes only.

    `replicated`: the axes on which all coordinates hold the same.
    """

    matrix: Matrix
    owner: Coordinate
    holdings: Mapping[Coordinate, Holding]
    replicated: frozenset[int] = frozenset()

    def key(self, coordinate: Coordinate) -> Coordinate:
        """The coordinate whose run, among equal ones of replicas, stands for `coordinate`'s."""
        return tuple(self.owner[axis] if axis in self.replicated else c for axis, c in enumerate(coordinate))

    @property
    def keys(self) -> tuple[Coordinate, ...]:
        return tuple(key for key in self.holdings if self.key(key) == key)


@dataclass(frozen=True)
class Message:
    """The runs `keys` of loan number `loan`, from one coordinate to another that differs on one axis."""

    loan: int
    source: Coordinate
    target: Coordinate
    keys: tuple[Coordinate, ...]
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Loans that travel together. `out[h]` and `back[h]` are this rank's messages on hop h, in wire order.

    `goes_out[h]` and `comes_back[h]` are true when any rank sends anything there, so that all ranks join the same
    collectives.
    """

    loans: tuple[int, ...]
    out: tuple[tuple[Message, ...], ...]
    back: tuple[tuple[Message, ...], ...]
    goes_out: tuple[bool, ...]
    comes_back: tuple[bool, ...]


@dataclass(frozen=True)
class Route:
    """All buckets of one step, seen from the rank at `coordinate`; the buckets themselves are the same on all ranks.

    axes: the axes to travel, outbound order. bucket_numel: a rank neither sends, nor receives, nor computes more
    elements than this in one bucket, except that one matrix may exceed it alone.
    """

    loans: tuple[Loan, ...]
    axes: tuple[int, ...]
    sizes: Coordinate
    coordinate: Coordinate
    bucket_numel: int
    buckets: tuple[Bucket, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.bucket_numel < 1:
            raise ValueError(f"bucket_numel: expected at least 1 element, got {self.bucket_numel}.")
        traces = [_Trace(index, loan, self.axes, self.sizes) for index, loan in enumerate(self.loans)]
        filling = _fill(traces, self.bucket_numel)
        object.__setattr__(self, "buckets", tuple(self._bucket(traces, members) for members in filling))

    def _bucket(self, traces: Sequence[_Trace], members: Sequence[int]) -> Bucket:
        num_hops = len(self.axes)
        out = [[m for i in members for m in traces[i].out[hop]] for hop in range(num_hops)]
        back = [[m for i in members for m in traces[i].back[hop]] for hop in range(num_hops)]
        return Bucket(
            tuple(members),
            tuple(self._mine(messages) for messages in out),
            tuple(self._mine(messages) for messages in back),
            tuple(map(bool, out)),
            tuple(map(bool, back)),
        )

    def _mine(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(m for m in messages if self.coordinate in (m.source, m.target))


class _Trace:
    """Every message of one loan: `out[hop]` in outbound order, `back[hop]` for the same hop on the way back."""

    def __init__(self, index: int, loan: Loan, axes: Sequence[int], sizes: Coordinate) -> None:
        self.index = index
        self.loan = loan
        self.out = list(self._outbound(axes))
        self.back = list(self._return(axes, sizes))[::-1]

    def _outbound(self, axes: Sequence[int]) -> Iterator[list[Message]]:
        at = {key: [key] for key in self.loan.keys}
        for axis in axes:
            messages = []
            moved: dict[Coordinate, list[Coordinate]] = defaultdict(list)
            for source in sorted(at):
                target = _replace(source, axis, self.loan.owner[axis])
                moved[target] += at[source]
                if target != source:
                    messages.append(self._message(source, target, at[source]))
            at = moved
            yield messages

    def _return(self, axes: Sequence[int], sizes: Coordinate) -> Iterator[list[Message]]:
        at = {self.loan.owner: sorted(self.loan.keys)}
        for axis in reversed(axes):
            messages = []
            moved: dict[Coordinate, list[Coordinate]] = defaultdict(list)
            for source in sorted(at):
                for target, keys in self._targets(source, at[source], axis, sizes[axis]).items():
                    moved[target] += keys
                    if target != source:
                        messages.append(self._message(source, target, keys))
            at = moved
            yield messages

    def _targets(
        self, source: Coordinate, keys: Sequence[Coordinate], axis: int, size: int
    ) -> dict[Coordinate, list[Coordinate]]:
        if axis in self.loan.replicated:
            return {_replace(source, axis, index): list(keys) for index in range(size)}
        targets: dict[Coordinate, list[Coordinate]] = defaultdict(list)
        for key in keys:
            targets[_replace(source, axis, key[axis])].append(key)
        return targets

    def _message(self, source: Coordinate, target: Coordinate, keys: Sequence[Coordinate]) -> Message:
        numel = sum(self.loan.holdings[key].numel for key in keys)
        return Message(self.index, source, target, tuple(keys), numel)

    def loads(self) -> dict[Place, int]:
        """Elements that each rank sends, receives and computes for this loan."""
        loads: dict[Place, int] = defaultdict(int)
        loads["computes", self.loan.owner] = self.loan.matrix.numel
        for way, hops in (("out", self.out), ("back", self.back)):
            for message in (message for hop in hops for message in hop):
                loads[f"sends {way}", message.source] += message.numel
                loads[f"receives {way}", message.target] += message.numel
        return loads


def _fill(traces: Sequence[_Trace], bucket_numel: int) -> list[list[int]]:
    """Each loan into the first bucket with room at every rank that it concerns; equal shapes stand together."""
    order = sorted(range(len(traces)), key=lambda i: (*(-n for n in traces[i].loan.matrix.shape), i))
    buckets: list[list[int]] = []
    filled: list[defaultdict[Place, int]] = []
    for index in order:
        loads = traces[index].loads()
        number = next((n for n, used in enumerate(filled) if _has_room(used, loads, bucket_numel)), len(buckets))
        if number == len(buckets):
            buckets.append([])
            filled.append(defaultdict(int))
        buckets[number].append(index)
        for place, numel in loads.items():
            filled[number][place] += numel
    return buckets


def _has_room(used: Mapping[Place, int], loads: Mapping[Place, int], bucket_numel: int) -> bool:
    return all(not used.get(place) or used[place] + numel <= bucket_numel for place, numel in loads.items())


def _replace(coordinate: Coordinate, axis: int, index: int) -> Coordinate:
    return (*coordinate[:axis], index, *coordinate[axis + 1 :])
