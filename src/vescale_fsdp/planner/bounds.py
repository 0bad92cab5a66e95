"""Shares below which no layout exists: in any number of buffers, and in one, where divisibility is forced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .problem import Kind, Problem

__all__ = ["COARSE", "SHARP", "Bounds", "any_layout_bound", "forced_bound"]

COARSE, SHARP = 3, 24
"""Up to which fraction of a block the runs are tried whose number per rank bounds the share."""


def any_layout_bound(problem: Problem, *, max_divisor: int = COARSE) -> int:
    """Least share of any system with equal shares and whole blocks, in one buffer or in many.

    For every G > 0, blocks b on one rank satisfy sum floor(b / G) <= floor(share / G), so the share is at least
    G * ceil(sum over all blocks of floor(b / G) / num_ranks).
    """
    return Bounds(problem).any_layout(range(len(problem.kinds)), max_divisor)


def forced_bound(problem: Problem, at_least: int) -> int:
    """Least share in one buffer: where one cut is not enough for a tensor, its blocks divide the share.

    Between two of the shares at which a tensor needs one cut only, the forced ones stay the same.
    """
    return Bounds(problem).forced(range(len(problem.kinds)), at_least)


class Bounds:
    """Both bounds for any choice of a problem's kinds; what the choices have in common is computed once."""

    def __init__(self, problem: Problem) -> None:
        kinds = problem.kinds
        self.problem = problem
        self.numels = [kind.numel * kind.count for kind in kinds]
        self.single_cuts = [(kind.smallest_single_cut_share, kind.granularity) for kind in kinds]
        self.blocks = [_blocks(kind) for kind in kinds]
        self.known: dict[int, int] = {}

    def one_buffer(self, chosen: Sequence[int], max_divisor: int) -> int:
        """Least share of one buffer that holds the chosen kinds and nothing else."""
        return self.forced(chosen, self.any_layout(chosen, max_divisor))

    def of_mask(self, mask: int) -> int:
        """The coarse bound of one buffer of the kinds whose bits are set, computed once."""
        known = self.known.get(mask)
        if known is None:
            known = self.known[mask] = self.one_buffer(self.kinds_in(mask), COARSE)
        return known

    def kinds_in(self, mask: int) -> tuple[int, ...]:
        return tuple([kind for kind in range(len(self.numels)) if mask >> kind & 1])

    def any_layout(self, chosen: Iterable[int], max_divisor: int = COARSE) -> int:
        """Least share of any layout of the chosen kinds."""
        num_ranks, numel = self.problem.num_ranks, 0
        counts: dict[int, int] = {}
        for kind in chosen:
            numel += self.numels[kind]
            for block, count in self.blocks[kind]:
                counts[block] = counts.get(block, 0) + count
        blocks = sorted(counts.items(), reverse=True)
        best = -(-numel // num_ranks)
        for size in sorted(_sizes(blocks, max_divisor), reverse=True):
            if size * -(-(numel // size) // num_ranks) > best:
                pieces = sum([block // size * count for block, count in blocks])
                best = max(best, size * -(-pieces // num_ranks))
        return self.problem.round_up(best)

    def forced(self, chosen: Iterable[int], at_least: int) -> int:
        """Least share of one buffer of the chosen kinds, not below a share that is known to be too small."""
        share = at_least
        cuts = [self.single_cuts[kind] for kind in chosen]
        while True:
            cuts = [cut for cut in cuts if cut[0] > share]
            rounded = self.problem.round_up(share, math.lcm(*[granularity for _, granularity in cuts]))
            if not cuts:
                return rounded
            share = min(cuts)[0]
            if rounded < share:
                return rounded


def _blocks(kind: Kind) -> list[tuple[int, int]]:
    """How many blocks of each size a kind has; the last block of a tensor may be short."""
    full, tail = divmod(kind.numel, kind.granularity)
    blocks = [(kind.granularity, full * kind.count)]
    return [*blocks, (tail, kind.count)] if tail else blocks


def _sizes(blocks: Sequence[tuple[int, int]], max_divisor: int) -> set[int]:
    """The G worth trying, from blocks largest first: their sizes, first fractions, and the gcds of the largest ones."""
    sizes: set[int] = set()
    common = 0
    for block, _ in blocks:
        common = math.gcd(common, block)
        sizes.add(common)
        sizes.update([block // divisor for divisor in range(1, max_divisor + 1)])
    return sizes - {0, 1}
