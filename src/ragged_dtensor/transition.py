"""From one tuple of placements to another, in integers: which axis changes when, and who sends which elements to whom.

`find_steps` orders the axes; each `Step` changes one placement on one mesh axis and moves elements only among the ranks
along it. `overlaps` says where the elements that two pieces share lie in the memory of each.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_dtensor.errors import LayoutError, UnsupportedTransitionError
from ragged_dtensor.layout import Box, Piece, Shape
from ragged_dtensor.ownership import Placements, application_order, piece_of, pieces_along
from ragged_dtensor.placement import RaggedShard

DIRECT_REDUCTIONS = {"sum", "avg", "max", "min"}


@dataclass(frozen=True)
class Step:
    """One axis changes its placement; the others keep theirs."""

    axis: int
    before: Placements
    after: Placements

    @property
    def source(self) -> Placement:
        return self.before[self.axis]

    @property
    def target(self) -> Placement:
        return self.after[self.axis]


# --- which axis, when


@functools.lru_cache(maxsize=4096)
def find_steps(shape: Shape, source: Placements, target: Placements, mesh: Shape) -> tuple[Step, ...]:
    """The cheapest sequence of steps, each to the axis' target or to Replicate.

    Raises LayoutError if source or target do not fit the shape, UnsupportedTransitionError if no sequence exists.
    """
    for placements in (source, target):
        piece_of(shape, placements, mesh, (0,) * len(mesh))
    counter = itertools.count()
    queue: list[tuple[float, int, Placements, tuple[Step, ...]]] = [(0, next(counter), source, ())]
    seen: set[Placements] = set()
    while queue:
        cost, _, placements, steps = heapq.heappop(queue)
        if placements == target:
            return steps
        if placements in seen:
            continue
        seen.add(placements)
        for step in _next_steps(shape, placements, target, mesh):
            total = cost + _cost(shape, step, mesh)
            heapq.heappush(queue, (total, next(counter), step.after, (*steps, step)))
    raise UnsupportedTransitionError(
        f"There is no way from {source} to {target} for a tensor of shape {shape} on a mesh of shape {mesh}. "
        "Partial can be a source but not a target; everything else can be reached through Replicate."
    )


def _next_steps(shape: Shape, placements: Placements, target: Placements, mesh: Shape) -> list[Step]:
    steps = []
    for axis, current in enumerate(placements):
        for wanted in dict.fromkeys((target[axis], Replicate())):
            step = Step(axis, placements, (*placements[:axis], wanted, *placements[axis + 1 :]))
            if current != wanted and _is_possible(shape, step, mesh):
                steps.append(step)
    return steps


def _is_possible(shape: Shape, step: Step, mesh: Shape) -> bool:
    if isinstance(step.target, Partial):
        return False
    if isinstance(step.source, Partial) and not is_direct(step.source) and step.target != Replicate():
        return False
    try:
        piece_of(shape, step.after, mesh, (0,) * len(mesh))
    except LayoutError:
        return False
    return _is_innermost(step.axis, step.before) and _is_innermost(step.axis, step.after)


def is_direct(placement: Partial) -> bool:
    """Whether a reduction can scatter its result. Subclasses reduce by rules of their own, to Replicate first."""
    return type(placement) is Partial and placement.reduce_op in DIRECT_REDUCTIONS


def _is_innermost(axis: int, placements: Placements) -> bool:
    """Whether no other axis cuts inside this axis' pieces: else the ranks along it would hold other elements after."""
    order = application_order(placements)
    later = order[order.index(axis) + 1 :]
    return not any(_dims(placements[axis]) & _dims(placements[other]) for other in later)


def _dims(placement: Placement) -> frozenset[int]:
    if isinstance(placement, RaggedShard):
        return frozenset(placement.dims)
    return frozenset({placement.dim}) if isinstance(placement, Shard) else frozenset()


def _cost(shape: Shape, step: Step, mesh: Shape) -> float:
    """Elements that a rank receives, roughly, and one more for the collective itself."""
    if isinstance(step.source, Replicate):
        return 0.0
    shards = {side: _num_shards(placements, mesh) for side, placements in (("in", step.before), ("out", step.after))}
    largest = math.prod(shape) / min(shards.values())
    return 1.0 + (2 * largest if isinstance(step.source, Partial) and isinstance(step.target, Replicate) else largest)


def _num_shards(placements: Placements, mesh: Shape) -> int:
    return math.prod(size for placement, size in zip(placements, mesh, strict=True) if _dims(placement))


# --- who sends what


@dataclass(frozen=True)
class Region:
    """A strided part of a rank's contiguous local memory."""

    sizes: Shape
    strides: Shape
    start: int

    @classmethod
    def flat(cls, start: int, numel: int) -> Region:
        return cls((numel,), (1,), start)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_flat(self) -> bool:
        return self.strides == _strides(self.sizes)


@dataclass(frozen=True)
class Overlap:
    """Elements that a source and a target piece share, in the same order in both regions."""

    source: Region
    target: Region

    @property
    def numel(self) -> int:
        return self.source.numel


def overlaps(source: Piece, target: Piece) -> tuple[Overlap, ...]:
    """Where the common elements lie in the local memory of each, in the order in which they are sent."""
    if source.offsets[1:] == target.offsets[1:] and source.sizes[1:] == target.sizes[1:]:
        (a, b), (c, d) = _flat_range(source), _flat_range(target)
        begin, end = max(a, c), min(b, d)
        if begin >= end:
            return ()
        return (Overlap(Region.flat(begin - a, end - begin), Region.flat(begin - c, end - begin)),)
    found = []
    for one, other in itertools.product(source.boxes(), target.boxes()):
        offsets = tuple(map(max, one.offsets, other.offsets))
        ends = tuple(
            min(o + s, p + t) for o, s, p, t in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        if all(size > 0 for size in sizes):
            found.append(Overlap(_region(one, offsets, sizes), _region(other, offsets, sizes)))
    return tuple(found)


def _flat_range(piece: Piece) -> tuple[int, int]:
    """Begin and end of a piece in the flat order of the box that it shares all but its first dim with."""
    width = math.prod(piece.sizes[1:])
    base = piece.offsets[0] * width if piece.offsets else 0
    if piece.num_flat is None:
        return base, base + math.prod(piece.sizes)
    row = math.prod(piece.sizes[piece.num_flat :])
    return base + piece.begin * row, base + piece.end * row


def _region(box: Box, offsets: Shape, sizes: Shape) -> Region:
    strides = _strides(box.sizes)
    start = sum((o - b) * stride for o, b, stride in zip(offsets, box.offsets, strides, strict=True))
    merged: list[tuple[int, int]] = []  # dims that lie one inside the other without a gap are one dim
    for size, stride in zip(sizes, strides, strict=True):
        if merged and (size == 1 or merged[-1][1] == size * stride):
            size, stride = size * merged[-1][0], stride if size > 1 else merged[-1][1]
            merged.pop()
        elif merged and merged[-1][0] == 1:
            merged.pop()
        merged.append((size, stride))
    return Region(tuple(size for size, _ in merged), tuple(stride for _, stride in merged), box.start + start)


def _strides(sizes: Shape) -> Shape:
    return tuple(itertools.accumulate((1, *reversed(sizes[1:])), int.__mul__))[::-1] if sizes else ()


@dataclass(frozen=True)
class Packing:
    """Parts of a local tensor in the order of a communication buffer, and how many elements belong to each peer."""

    regions: tuple[Region, ...]
    splits: tuple[int, ...]
    numel: int

    @functools.cached_property
    def is_memory(self) -> bool:
        """Whether the buffer can be the local tensor's own memory."""
        starts = itertools.accumulate((region.numel for region in self.regions), initial=0)
        in_order = all(
            region.is_flat and region.start == start for region, start in zip(self.regions, starts, strict=False)
        )
        return in_order and sum(self.splits) == self.numel


@dataclass(frozen=True)
class Transfer:
    """What the rank at `rank` of the axis sends and receives in one step."""

    send: Packing
    receive: Packing
    moves_nothing: bool


@functools.lru_cache(maxsize=4096)
def plan_transfer(shape: Shape, step: Step, mesh: Shape, coordinate: tuple[int, ...]) -> Transfer:
    """Transfer among the ranks along `step.axis`, seen from `coordinate`; every source piece is held once."""
    sources = pieces_along(shape, step.before, step.axis, mesh, coordinate)
    targets = pieces_along(shape, step.after, step.axis, mesh, coordinate)
    rank = coordinate[step.axis]
    return Transfer(
        send=_packing([[o.source for o in overlaps(sources[rank], target)] for target in targets], sources[rank]),
        receive=_packing([[o.target for o in overlaps(source, targets[rank])] for source in sources], targets[rank]),
        moves_nothing=all(
            sum(o.numel for o in overlaps(a, b)) == max(a.numel, b.numel) for a, b in zip(sources, targets, strict=True)
        ),
    )


@functools.lru_cache(maxsize=4096)
def plan_slice(shape: Shape, step: Step, mesh: Shape, coordinate: tuple[int, ...]) -> Packing:
    """The parts of a replica that the rank keeps."""
    source, target = piece_of(shape, step.before, mesh, coordinate), piece_of(shape, step.after, mesh, coordinate)
    return _packing([[o.source for o in overlaps(source, target)]], source)


@dataclass(frozen=True)
class Movement:
    """One step seen from one rank, in numbers; each is computed when first asked for and kept."""

    shape: Shape
    step: Step
    mesh: Shape
    coordinate: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This rank's place along the axis that changes."""
        return self.coordinate[self.step.axis]

    @functools.cached_property
    def result(self) -> Piece:
        return piece_of(self.shape, self.step.after, self.mesh, self.coordinate)

    @functools.cached_property
    def transfer(self) -> Transfer:
        return plan_transfer(self.shape, self.step, self.mesh, self.coordinate)

    @functools.cached_property
    def kept(self) -> Packing:
        return plan_slice(self.shape, self.step, self.mesh, self.coordinate)

    @functools.cached_property
    def numels_before(self) -> tuple[int, ...]:
        """Elements that each rank along the axis holds before the step."""
        return self._numels(self.step.before)

    @functools.cached_property
    def numels_after(self) -> tuple[int, ...]:
        return self._numels(self.step.after)

    def _numels(self, placements: Placements) -> tuple[int, ...]:
        pieces = pieces_along(self.shape, placements, self.step.axis, self.mesh, self.coordinate)
        return tuple(piece.numel for piece in pieces)


@functools.lru_cache(maxsize=4096)
def find_movements(
    shape: Shape, source: Placements, target: Placements, mesh: Shape, coordinate: tuple[int, ...]
) -> tuple[Shape, tuple[Movement, ...]]:
    """The local shape to start from, and the steps as this rank takes them."""
    local = piece_of(shape, source, mesh, coordinate).local_shape
    steps = find_steps(shape, source, target, mesh)
    return local, tuple(Movement(shape, step, mesh, coordinate) for step in steps)


def _packing(regions_by_peer: list[list[Region]], piece: Piece) -> Packing:
    splits = tuple(sum(region.numel for region in regions) for regions in regions_by_peer)
    return Packing(tuple(itertools.chain(*regions_by_peer)), splits, piece.numel)
