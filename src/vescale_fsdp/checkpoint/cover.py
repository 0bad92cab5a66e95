"""Do these boxes hold every element of a tensor once? Told by sorting them, without comparing each with every other.

    shape (3, 4)    (0, 0)+(1, 4)  (1, 0)+(1, 1)  (1, 1)+(1, 3)  (2, 0)+(1, 4)
    are the runs    0..4           4..5           5..8           8..12            of the flattened tensor: yes

What a flat cut leaves are runs of the flattened tensor. Other boxes, as those of tensor parallelism along columns, are
swept along the dim in which they begin at most places, and each is compared with those that reach as far.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence

__all__ = ["Box", "uncovered"]

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes."""


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with the boxes of a tensor of `shape`, or None if every element lies in exactly one."""
    for offsets, sizes in boxes:
        for begin, size, end in zip(offsets, sizes, shape, strict=True):
            if begin < 0 or size < 0 or begin + size > end:
                return f"the box {_named((offsets, sizes))} reaches beyond {tuple(shape)}"
    boxes = [box for box in boxes if math.prod(box[1])]
    runs = _as_runs(shape, boxes)
    overlapping = _overlap(boxes) if runs is None else _overlap_of_runs(runs)
    if overlapping is not None:
        return f"the boxes {' and '.join(_named(boxes[index]) for index in overlapping)} overlap"
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    return None if held == whole else f"its boxes hold {held} of its {whole} elements"


def _named(box: Box) -> str:
    return f"{tuple(box[0])}+{tuple(box[1])}"


def _as_runs(shape: Sequence[int], boxes: Sequence[Box]) -> list[tuple[int, int, int]] | None:
    """(begin, end, index) of each box in the flattened tensor; None if some box is no run of it."""
    runs = []
    for index, (offsets, sizes) in enumerate(boxes):
        begin, numel = 0, 1
        for offset, size, whole in zip(offsets, sizes, shape, strict=True):
            if numel > 1 and size != whole:
                return None
            begin = begin * whole + offset
            numel *= size
        runs.append((begin, begin + numel, index))
    return runs


def _overlap_of_runs(runs: list[tuple[int, int, int]]) -> tuple[int, int] | None:
    """The indices of two that overlap, or None."""
    reached, last = 0, 0
    for begin, end, index in sorted(runs):
        if begin < reached:
            return last, index
        reached, last = end, index
    return None


def _overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The indices of two that overlap, or None."""
    dims = range(len(boxes[0][0]))
    along = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    firsts = [offsets for offsets, _ in boxes]
    ends = [[begin + size for begin, size in zip(*box, strict=True)] for box in boxes]
    reaching: list[tuple[int, int]] = []
    for index in sorted(range(len(boxes)), key=lambda index: firsts[index][along]):
        first, end = firsts[index], ends[index]
        del reaching[: bisect_right(reaching, (first[along], len(boxes)))]
        for _, other in reaching:
            if all(a < d and c < b for a, b, c, d in zip(first, end, firsts[other], ends[other], strict=True)):
                return other, index
        insort(reaching, (end[along], index))
    return None
