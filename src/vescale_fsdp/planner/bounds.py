"""Shares below which no layout exists: in any number of buffers, and in one, where divisibility is forced."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Sequence

from .problem import Kind, Problem

__all__ = ["COARSE", "SHARP", "Bounds", "any_layout_bound", "forced_bound", "mask_of"]

COARSE, SHARP = 3, 24
"""Up to which fraction of a block the runs are tried whose number per rank bounds the share."""


def any_layout_bound(problem: Problem, *, max_divisor: int = COARSE) -> int:
    """Least share of any system with equal shares and whole blocks, in one buffer or in many.

    For every G > 0, blocks b on one rank satisfy sum floor(b / G) <= floor(share / G), so the share is at least
    G * ceil(sum over all blocks of floor(b / G) / num_ranks).
    """
    return Bounds(problem).any_layout(max_divisor)


def forced_bound(problem: Problem, at_least: int) -> int:
    """Least share in one buffer: where one cut is not enough for a tensor, its blocks divide the share.

    Between two of the shares at which a tensor needs one cut only, the forced ones stay the same.
    """
    bounds = Bounds(problem)
    return bounds.forced(bounds.everything, at_least)


class Bounds:
    """Both bounds for any choice of a problem's tensors; what the choices have in common is computed once.

    A choice is a number of tensors of each kind, or a mask, one bit per kind: all tensors of these kinds.
    """

    def __init__(self, problem: Problem) -> None:
        kinds = problem.kinds
        self.problem = problem
        self.counts = tuple([kind.count for kind in kinds])
        self.numels = tuple([kind.numel for kind in kinds])
        self.everything = (1 << len(kinds)) - 1
        self.totals = [(1 << i, kind.numel * kind.count) for i, kind in enumerate(kinds)]
        self.cuts = [(kind.smallest_single_cut_share, kind.granularity, 1 << i) for i, kind in enumerate(kinds)]
        self.cuts.sort()
        self.thresholds = [threshold for threshold, _, _ in self.cuts]
        bits = [bit for _, _, bit in self.cuts]
        self.cut_twice = [sum(bits[at:]) for at in range(len(bits) + 1)]  # where so many thresholds are reached
        self.steps: dict[int, tuple[int, int]] = {}
        self.blocks = [(*block, i, 1 << i) for i, kind in enumerate(kinds) for block in _blocks(kind)]
        self.blocks.sort(reverse=True)
        self.any_layouts: dict[int, int] = {}
        self.of_masks: dict[int, int] = {}
        self.counts_of: dict[int, tuple[int, ...]] = {}
        self.known: dict[tuple[int, ...], int] = {}

    def of_mask(self, mask: int) -> int:
        """The coarse bound of one buffer of the kinds whose bits are set, computed once."""
        known = self.of_masks.get(mask)
        if known is None:
            known = self.of_masks[mask] = self._one_buffer(mask, self.counts, self.numel(mask), COARSE)
        return known

    def all_of(self, mask: int) -> tuple[int, ...]:
        """All tensors of the kinds whose bits are set, as counts per kind."""
        if mask not in self.counts_of:
            counts = tuple([count if mask >> i & 1 else 0 for i, count in enumerate(self.counts)])
            self.counts_of[mask], self.known[counts] = counts, self.of_mask(mask)
        return self.counts_of[mask]

    def of_counts(self, counts: tuple[int, ...]) -> int:
        """The coarse bound of one buffer of so many tensors of each kind, computed once."""
        known = self.known.get(counts)
        if known is None:
            known = self.known[counts] = self.one_buffer(counts, COARSE)
        return known

    def one_buffer(self, counts: tuple[int, ...], max_divisor: int) -> int:
        """Least share of one buffer that holds so many tensors of each kind and nothing else."""
        if max_divisor == COARSE and counts in self.known:
            return self.known[counts]
        return self._one_buffer(mask_of(counts), counts, self.held(counts), max_divisor)

    def held(self, counts: Sequence[int]) -> int:
        """Elements of so many tensors of each kind."""
        return sum(map(operator.mul, self.numels, counts))

    def numel(self, mask: int) -> int:
        """Elements of all tensors of the kinds whose bits are set."""
        return sum([total for bit, total in self.totals if mask & bit])

    def any_layout(self, max_divisor: int = COARSE) -> int:
        """Least share of any layout of all tensors."""
        if max_divisor not in self.any_layouts:
            numel = self.problem.numel
            share = -(-numel // self.problem.num_ranks)
            share = self._whole_blocks(self.everything, self.counts, numel, share, max_divisor)
            self.any_layouts[max_divisor] = self.problem.round_up(share)
        return self.any_layouts[max_divisor]

    def forced(self, mask: int, share: int) -> int:
        """Least share of one buffer of the chosen kinds, not below a share that is known to be too small."""
        while chosen := mask & self.cut_twice[bisect_right(self.thresholds, share)]:
            step, single_cut = self.steps.get(chosen) or self._step(chosen)
            rounded = -(-share // step) * step
            if rounded < single_cut:
                return rounded
            share = single_cut
        return self.problem.round_up(share)

    def _step(self, mask: int) -> tuple[int, int]:
        """What a share is a multiple of where all these kinds are cut twice, and from where one of them is not."""
        chosen = [(threshold, granularity) for threshold, granularity, bit in self.cuts if mask & bit]
        step = math.lcm(self.problem.unit, *[granularity for _, granularity in chosen])
        self.steps[mask] = step, chosen[0][0]
        return self.steps[mask]

    def _one_buffer(self, mask: int, counts: Sequence[int], numel: int, max_divisor: int) -> int:
        share = self.forced(mask, -(-numel // self.problem.num_ranks))
        more = self._whole_blocks(mask, counts, numel, share, max_divisor)
        return share if more == share else self.forced(mask, more)

    def _whole_blocks(self, mask: int, counts: Sequence[int], numel: int, share: int, max_divisor: int) -> int:
        """A share that is known to be too small, raised where whole blocks do not fill it.

        Runs of G raise it to less than (numel + G * num_ranks) / num_ranks, so that small ones need no look.
        """
        num_ranks = self.problem.num_ranks
        negligible = (num_ranks * share - numel) // max(1, num_ranks - 1)
        large = [block for block, _, _, bit in self.blocks if block > negligible and mask & bit]
        if num_ranks == 1 or not large:
            return share
        for size in _sizes(large, max_divisor, max(1, negligible)):
            if size * -(-(numel // size) // num_ranks) > share:
                blocks = [block // size * number * counts[i] for block, number, i, bit in self.blocks if mask & bit]
                share = max(share, size * -(-sum(blocks) // num_ranks))
        return share


def mask_of(counts: Sequence[int]) -> int:
    """A bit for each kind of which there are any."""
    return sum([1 << i for i, count in enumerate(counts) if count])


def _blocks(kind: Kind) -> list[tuple[int, int]]:
    """How many blocks of each size a tensor of this kind has; the last one may be short."""
    full, tail = divmod(kind.numel, kind.granularity)
    return [(kind.granularity, full), (tail, 1)] if tail else [(kind.granularity, full)]


def _sizes(blocks: Sequence[int], max_divisor: int, negligible: int) -> list[int]:
    """The G worth trying, from blocks largest first: their sizes, first fractions, and the gcds of the largest ones."""
    sizes: list[int] = []
    common, last = 0, 0
    for block in blocks:
        common = math.gcd(common, block)
        if common > negligible and common != block:
            sizes.append(common)
        if block != last:
            sizes += [block // divisor for divisor in range(1, min(max_divisor, block // (negligible + 1)) + 1)]
        last = block
    return sizes
