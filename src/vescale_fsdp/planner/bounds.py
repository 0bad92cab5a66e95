"""Shares below which no layout exists: in any number of buffers, and in one, where divisibility is forced."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .problem import Kind, Problem

__all__ = ["any_layout_bound", "forced_bound"]


def any_layout_bound(problem: Problem, *, max_divisor: int = 3) -> int:
    """Least share of any system with equal shares and whole blocks, in one buffer or in many.

    For every G > 0, blocks b on one rank satisfy sum floor(b / G) <= floor(share / G), so the share is at least
    G * ceil(sum over all blocks of floor(b / G) / num_ranks).
    """
    if not problem.kinds:
        return 0
    best = -(-problem.numel // problem.num_ranks)
    blocks = _blocks(problem.kinds)
    for size in sorted(_sizes(blocks, max_divisor)):
        if size > 1:
            pieces = sum(block // size * count for block, count in blocks.items())
            best = max(best, size * -(-pieces // problem.num_ranks))
    return problem.round_up(best)


def forced_bound(problem: Problem, at_least: int) -> int:
    """Least share in one buffer: where one cut is not enough for a tensor, its blocks divide the share.

    Between two of the shares at which a tensor needs one cut only, the forced ones stay the same.
    """
    share = at_least
    while True:
        forced = [kind for kind in problem.kinds if kind.smallest_single_cut_share > share]
        rounded = problem.round_up(share, math.lcm(*(kind.granularity for kind in forced)))
        share = min((kind.smallest_single_cut_share for kind in forced), default=rounded + 1)
        if rounded < share:
            return rounded


def _blocks(kinds: Sequence[Kind]) -> dict[int, int]:
    """How many blocks there are of each size; the last block of a tensor may be short."""
    blocks: dict[int, int] = {}
    for kind in kinds:
        full, tail = divmod(kind.numel, kind.granularity)
        blocks[kind.granularity] = blocks.get(kind.granularity, 0) + full * kind.count
        if tail:
            blocks[tail] = blocks.get(tail, 0) + kind.count
    return blocks


def _sizes(blocks: dict[int, int], max_divisor: int) -> set[int]:
    """The G worth trying: every block size and its first fractions, and the gcds of the largest ones."""
    sizes, common = set(), 0
    for block in sorted(blocks, reverse=True):
        common = math.gcd(common, block)
        sizes.add(common)
        sizes.update(block // divisor for divisor in range(1, max_divisor + 1))
    return sizes
