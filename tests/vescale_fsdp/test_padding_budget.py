"""A31: what layouts pad on well-known models at 8 to 1,024 ranks; cells above the budget are named with their bound."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp.model_plan import plan_model
from vescale_fsdp.shapes import ModelShapes, read_shapes
from vescale_fsdp.wishes import grant, parse_wish

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
BUDGET_PCT = 3.0
POWERS = tuple(2**power for power in range(3, 11))
RANKS = (*POWERS, *(3 * count for count in POWERS[:-2]), 1000)

EXPERTS = {
    "deepseek-v3-671b": "*experts*",
    "gpt-oss-120b": "*mlp?_weight",
    "gpt-oss-20b": "*mlp?_weight",
    "qwen3-235b-a22b": "*experts*",
}
"""Names of their experts' weights, fused or not."""
ZOO = ("llama3-8b", "llama3-70b", "llama3.1-405b", "vit-l16", *EXPERTS)

ABOVE: dict[str, dict[int, float]] = {
    # A share of a layer is 24.03 rows of 4,096 elements at 128 ranks, 3.1 at 1,000.
    "vit-l16": {96: 3.1, 128: 4.2, 1000: 14.1},
    # 15.2 rows of 14,336 elements.
    "llama3-8b": {1000: 4.6},
}
"""In rows: percent that a cell may pad, where that is more than the budget."""


@cache
def shapes(model: str, *wishes: str) -> ModelShapes:
    return grant(read_shapes(str(MODELS / f"{model}.json")), [parse_wish("rows", wish) for wish in wishes])


@cache
def numel(model: str) -> int:
    """Straight from the file."""
    groups: list[dict[str, Any]] = json.loads((MODELS / f"{model}.json").read_text())["groups"]
    return sum(group["count"] * sum(math.prod(shape) for _, shape in group["params"]) for group in groups)


def padding_pct(model: str, num_ranks: int, *wishes: str) -> float:
    """From what every rank stores."""
    plan = plan_model(shapes(model, *wishes), num_ranks)
    stored = num_ranks * sum(group.plan.share * group.shapes.count for group in plan.groups)
    assert stored >= numel(model)
    return 100 * (stored - numel(model)) / numel(model)


def above_budget(model: str, *wishes: str) -> dict[int, float]:
    found = {num_ranks: padding_pct(model, num_ranks, *wishes) for num_ranks in RANKS}
    return {num_ranks: pct for num_ranks, pct in found.items() if pct > BUDGET_PCT}


@pytest.mark.parametrize("model", ZOO)
def test_rows_pad_three_percent_at_most_but_in_the_cells_that_are_named(model: str) -> None:
    known, found = ABOVE.get(model, {}), above_budget(model, "1")
    assert found.keys() == known.keys(), found
    assert all(found[num_ranks] <= known[num_ranks] for num_ranks in known), found


@pytest.mark.parametrize("model", EXPERTS)
def test_experts_in_blocks_of_16_rows_pad_three_percent_at_most(model: str) -> None:
    wishes = ("1", f"{EXPERTS[model]}=16")
    blocks = {spec.fqn for spec in shapes(model, *wishes).specs} - unchanged(model, *wishes)
    assert any("mlp" in fqn or "expert" in fqn for fqn in blocks)
    assert above_budget(model, *wishes) == {}


def unchanged(model: str, *wishes: str) -> set[str]:
    """Parameters whose granularity is that of one row."""
    rows = {spec.fqn: spec.granularity for spec in shapes(model, "1").specs}
    return {spec.fqn for spec in shapes(model, *wishes).specs if spec.granularity == rows[spec.fqn]}


@pytest.mark.parametrize("model", ZOO)
def test_cuts_between_elements_pad_a_thousandth_at_most(model: str) -> None:
    assert max(padding_pct(model, num_ranks) for num_ranks in RANKS) <= 0.1
