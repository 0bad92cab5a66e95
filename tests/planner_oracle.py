"""The planner's problem once more, as slowly and plainly as possible; nothing here comes from the code under test."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Placement(Protocol):
    """What a layout says: the lane and start of each tensor, and each lane's share."""

    @property
    def lane_of(self) -> tuple[int, ...]: ...
    @property
    def starts(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Case:
    """Tensors of `numels` elements, cut every `granularities` of them, over `num_ranks`."""

    numels: tuple[int, ...]
    granularities: tuple[int, ...]
    num_ranks: int
    unit: int = 1
    align: int = 1

    @property
    def step(self) -> int:
        return math.lcm(self.unit, self.align)

    @property
    def tensors(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((numel, run, run) for numel, run in zip(self.numels, self.granularities, strict=True))


def violations(case: Case, placement: Placement, shares: Sequence[int]) -> Iterator[str]:
    """Every broken rule, found by walking over all elements' owners rather than by arithmetic on cuts."""
    taken: dict[tuple[int, int], int] = {}
    for share in shares:
        if share % case.step:
            yield f"share {share} is no multiple of {case.step}"
    for i, (numel, run) in enumerate(zip(case.numels, case.granularities, strict=True)):
        lane, start = placement.lane_of[i], placement.starts[i]
        if start % case.align:
            yield f"tensor {i} starts at {start}"
        owners = [(start + element) // shares[lane] for element in range(numel)]
        if owners and owners[-1] >= case.num_ranks:
            yield f"tensor {i} ends behind the buffer"
        for begin in range(0, numel, run):
            if len(set(owners[begin : begin + run])) > 1:
                yield f"tensor {i}: a block of {run} lies on several ranks"
        for element in range(numel):
            other = taken.setdefault((lane, start + element), i)
            if other != i:
                yield f"tensors {other} and {i} overlap"


def least_share(case: Case) -> int:
    """The optimum in one buffer: the first share for which some order of the tensors fits."""
    tensors = sorted((e, min(e, g)) for e, g in zip(case.numels, case.granularities, strict=True) if e)
    share = -(-sum(numel for numel, _ in tensors) // (case.num_ranks * case.step)) * case.step
    orders = sorted(set(itertools.permutations(tensors)))
    while not any(_fits(order, case, share) for order in orders):
        share += case.step
    return share


def _fits(order: Sequence[tuple[int, int]], case: Case, share: int) -> bool:
    position = 0
    for numel, run in order:
        start = -(-position // case.align) * case.align
        while start + numel <= case.num_ranks * share and not _is_legal(start, numel, run, share):
            start += case.align
        position = start + numel
        if position > case.num_ranks * share:
            return False
    return True


def _is_legal(start: int, numel: int, run: int, share: int) -> bool:
    cuts = range((start // share + 1) * share, start + numel, share)
    return all((cut - start) % run == 0 for cut in cuts)


def random_cases(seed: int, count: int, max_tensors: int = 6) -> Iterator[Case]:
    """Small cases of every kind: repeated tensors, empty ones, whole ones, units and alignments."""
    rng = random.Random(seed)
    for _ in range(count):
        sizes = range(1, rng.choice([4, 8, 20, 40]) + 1)
        numels = [0 if rng.random() < 0.04 else rng.choice(sizes) for _ in range(rng.randint(1, max_tensors))]
        if rng.random() < 0.4:
            numels = [rng.choice(numels) for _ in numels]
        runs = rng.choice([(1, 2, 3), (1, 4, 6), (2, 3, 5, 7), (1, 8), (3, 4, 9, 50)])
        unit, align = rng.choice([(1, 1), (1, 1), (2, 1), (4, 2), (2, 2), (4, 4)])
        yield Case(tuple(numels), tuple(rng.choice(runs) for _ in numels), rng.randint(1, 7), unit, align)
