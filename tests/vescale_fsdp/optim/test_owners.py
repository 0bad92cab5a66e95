"""Owners are balanced, deterministic, and stay with their data where that costs nothing."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vescale_fsdp.optim.matrices import matrices_of
from vescale_fsdp.optim.orthogonalize import NewtonSchulz
from vescale_fsdp.optim.owners import best_load, select_owners

MODELS = sorted((Path(__file__).parents[3] / "benchmarks" / "models").glob("*.json"))
NOT_HIDDEN = re.compile(r"embed|head|wte|wpe|token|pos|shared\.weight|lm_")


def costs_of(path: Path) -> list[int]:
    """Of all hidden matrices of a public model; a stack of experts counts as so many, a convolution as one."""
    costs = []
    for group in json.loads(path.read_text())["groups"]:
        shapes = [(fqn, shape) for fqn, shape, *_ in group["params"] if len(shape) > 1 and not NOT_HIDDEN.search(fqn)]
        matrices = [m for fqn, shape in shapes for m in matrices_of(shape, flatten="conv" in fqn and len(shape) == 3)]
        costs += [NewtonSchulz().flops(*matrix.shape) for matrix in matrices] * group["count"]
    return costs


def counting_forbids(costs: list[int], num_ranks: int, capacity: float) -> bool:
    """Quickly, by counting: with the dearest k kinds weighted, no rank's load within capacity is worth enough."""
    kinds = sorted(set(costs), reverse=True)[:3]
    counts = [costs.count(kind) for kind in kinds]
    loads = [
        load
        for load in itertools.product(*(range(int(capacity // kind) + 1) for kind in kinds))
        if sum(n * kind for n, kind in zip(load, kinds, strict=True)) <= capacity
    ]
    for weights in itertools.product(range(13), repeat=len(kinds)):
        best = max(sum(w * n for w, n in zip(weights, load, strict=True)) for load in loads)
        if sum(w * n for w, n in zip(weights, counts, strict=True)) > num_ranks * best:
            return True
    return False


def whole_matrices_fit(costs: list[int], num_ranks: int, capacity: float) -> bool:
    """Exactly, slowly: which counts of each kind may be left over, when rank after rank takes as much as fits."""
    kinds = sorted(Counter(costs).items(), reverse=True)
    loads = set(itertools.product(*(range(min(count, int(capacity // kind)) + 1) for kind, count in kinds)))
    loads = {load for load in loads if sum(n * kind for n, (kind, _) in zip(load, kinds, strict=True)) <= capacity}
    full = [load for load in loads if not any(_with_one_more(load, i) in loads for i in range(len(kinds)))]
    left = torch.zeros([count + 1 for _, count in kinds], dtype=torch.bool)
    left[tuple(count for _, count in kinds)] = True
    for _ in range(num_ranks):
        left = torch.stack([_without(left, load) for load in full]).any(0)
    return bool(left[(0,) * left.ndim])


def _with_one_more(load: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*load[:kind], load[kind] + 1, *load[kind + 1 :])


def _without(left: Tensor, load: tuple[int, ...]) -> Tensor:
    """Subtract a load along every dim, stopping at none."""
    for dim, taken in enumerate(load):
        taken = min(taken, left.size(dim) - 1)
        none = left.narrow(dim, 0, taken + 1).any(dim, keepdim=True)
        rest = left.narrow(dim, taken + 1, left.size(dim) - taken - 1)
        left = torch.cat([none, rest, torch.zeros_like(left.narrow(dim, 0, taken))], dim)
    return left


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("num_ranks", [8, 16, 24, 32, 48, 64])
def test_no_load_exceeds_the_mean_or_the_dearest_matrix_by_five_percent_unless_none_could(
    model: Path, num_ranks: int
) -> None:
    costs = costs_of(model)
    ownership = select_owners(costs, num_ranks)
    limit = 1.05 * max(sum(costs) / num_ranks, max(costs))
    if ownership.max_load > limit:  # nor can anybody do five percent better than this
        for load in (limit, ownership.max_load / 1.05):
            assert counting_forbids(costs, num_ranks, load) or not whole_matrices_fit(costs, num_ranks, load)


def test_the_proof_that_matrices_do_not_fit_knows_what_fits() -> None:
    assert whole_matrices_fit([5, 4, 3, 3, 3], 2, 9)
    assert not whole_matrices_fit([5, 4, 3, 3, 3], 2, 8.9)
    assert not whole_matrices_fit([2, 2, 2], 2, 3.9)


def test_every_matrix_has_one_owner_and_loads_are_the_sums_of_costs() -> None:
    costs = costs_of(next(path for path in MODELS if path.stem == "gpt2-124m"))
    ownership = select_owners(costs, 7)
    assert len(ownership.owners) == len(costs)
    for rank in range(7):
        assert ownership.loads[rank] == sum(c for c, o in zip(costs, ownership.owners, strict=True) if o == rank)


def test_small_cases_are_within_five_percent_of_the_best_of_all_assignments() -> None:
    generator = random.Random(1)
    for _ in range(60):
        costs = [generator.choice([3, 5, 8, 13]) * 10 for _ in range(generator.randint(1, 7))]
        num_ranks = generator.randint(1, 3)
        best = min(
            max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(num_ranks))
            for owners in itertools.product(range(num_ranks), repeat=len(costs))
        )
        assert best_load(costs, num_ranks) <= best
        assert select_owners(costs, num_ranks).max_load <= 1.1 * best


def test_the_rank_that_holds_most_owns_where_balance_allows() -> None:
    held = [{0: 3, 1: 1}, {1: 4}, {2: 2, 0: 1}, {2: 1, 1: 3}, {0: 4}, {2: 4}]
    assert select_owners([10] * 6, 3, held=held).owners == (0, 1, 2, 1, 0, 2)


def test_balance_goes_before_holding() -> None:
    ownership = select_owners([10] * 6, 3, held=[{0: 4}] * 6)
    assert ownership.loads == (20, 20, 20)


def test_a_whole_matrix_stays_whatever_the_load() -> None:
    ownership = select_owners([10] * 4, 2, whole=[1, 1, 1, None])
    assert ownership.owners == (1, 1, 1, 0)


def test_more_ranks_than_matrices_and_none_at_all() -> None:
    assert sorted(select_owners([5, 5], 4).loads) == [0, 0, 5, 5]
    assert select_owners([], 3).loads == (0, 0, 0)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks: expected at least 1, got 0"):
        select_owners([1], 0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        select_owners([-1], 2)
