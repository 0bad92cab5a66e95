"""Shares below which no layout exists: the any-layout bound, and the one that forced divisibility adds in one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .problem import Kind, Problem

__all__ = ["any_layout_bound", "forced_bound"]


def any_layout_bound(problem: Problem) -> int:
    """Least share of any system with equal shares and whole blocks, in one buffer or in many.

    For every G > 0, blocks b on one rank satisfy sum floor(b / G) <= floor(share / G), so the share is at least
    G * ceil(sum over all blocks of floor(b / G) / num_ranks).
    """
    if not problem.kinds:
        return 0
    best = -(-problem.numel // problem.num_ranks)
    blocks = _blocks(problem.kinds)
    for size in sorted(_sizes(blocks)):
        if size > 1:
            pieces = sum(block // size * count for block, count in blocks.items())
            best = max(best, size * -(-pieces // problem.num_ranks))
    return problem.round_up(best)


def forced_bound(problem: Problem, at_least: int) -> int:
    """Least share in one buffer: a tensor too large to cross one boundary only crosses two, so its blocks divide the share.

    Tensors sorted by the share at which they become small enough: the forced ones are a prefix, for every share.
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


def _sizes(blocks: dict[int, int]) -> Iterator[int]:
    """The G worth trying: every block size, its half and third, and the gcds of the largest ones."""
    common = 0
    for block in sorted(blocks, reverse=True):
        yield from (block, block // 2, -(-block // 2), block // 3, -(-block // 3))
        common = math.gcd(common, block)
        yield common
