"""Real models: the reference table is not exceeded with one lane, undercut with two, and other models hold as well."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from public_shapes import LAYERS, Shapes

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.layout import Layout
from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.planner import make_plan, plan_group
from vescale_fsdp.planner.bounds import Bounds
from vescale_fsdp.planner.groups import lay_out_group
from vescale_fsdp.planner.lanes import lay_out_lanes
from vescale_fsdp.planner.problem import Problem
from vescale_fsdp.spec import ParamSpec

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
RANKS = (1, 2, 3, 7, 8, 48, 96, 256, 1000, 4096, 16384)


@cache
def reference() -> list[dict[str, str]]:
    with (MODELS / "reference_padding.csv").open() as file:
        return list(csv.DictReader(file))


@cache
def groups_of(model: str) -> list[tuple[int, Shapes]]:
    groups = json.loads((MODELS / f"{model}.json").read_text())["groups"]
    return [(group["count"], tuple((name, tuple(shape)) for name, shape in group["params"])) for group in groups]


def granularity(name: str, shape: tuple[int, ...], rows: str) -> int:
    """Rows of the last dim for fused experts, else of everything behind the first; Muon takes hidden matrices whole."""
    if rows != "muon":
        row = 1 if len(shape) < 2 else shape[-1] if len(shape) == 3 else math.prod(shape[1:])
        return int(rows) * row
    if any(word in name for word in ("embed", "wpe", "head.weight")):
        return math.prod(shape[1:])
    if "bias" in name or len(shape) < 2:
        return 1
    return shape[1] * shape[2] if len(shape) == 3 else math.prod(shape)


def lay_out(shapes: Shapes, rows: str, num_ranks: int, max_lanes: int) -> Layout:
    tensors = tuple((math.prod(shape), run := granularity(name, shape, rows), run) for name, shape in shapes)
    return lay_out_group(tensors, num_ranks, 8, 8, max_lanes, 0)


def padding_pct(row: dict[str, str], max_lanes: int) -> float:
    num_ranks, numel, padded = int(row["num_ranks"]), 0, 0
    for count, shapes in groups_of(row["model"]):
        numel += count * sum(math.prod(shape) for _, shape in shapes)
        padded += count * num_ranks * lay_out(shapes, row["rows"], num_ranks, max_lanes).share
    return 100 * (padded - numel) / numel


def test_one_lane_is_never_above_the_reference_by_more_than_a_hundredth_of_a_percent() -> None:
    excess = {tuple(row.values())[:3]: padding_pct(row, 1) - float(row["reference_1_lane_pct"]) for row in reference()}
    assert len(excess) == 1000
    assert {cell: pct for cell, pct in excess.items() if pct > 0.01} == {}


def test_one_lane_is_within_a_thousandth_of_its_own_bound_on_997_group_plans_of_1000() -> None:
    cells = [(row, shapes) for row in reference() for _, shapes in groups_of(row["model"])]
    layouts = [lay_out(shapes, row["rows"], int(row["num_ranks"]), 1) for row, shapes in cells]
    near = sum(layout.share * 1000 <= layout.lanes[0].bound * 1001 for layout in layouts)
    assert near >= 0.997 * len(layouts)


def test_bounds_are_never_above_what_anyone_reached() -> None:
    for row in reference():
        num_ranks, numel, one_lane, any_layout = int(row["num_ranks"]), 0, 0, 0
        for count, shapes in groups_of(row["model"]):
            layout = lay_out(shapes, row["rows"], num_ranks, 1)
            numel += count * sum(math.prod(shape) for _, shape in shapes)
            one_lane += count * num_ranks * layout.lanes[0].bound
            any_layout += count * num_ranks * layout.bound
        reached = [float(row[f"reference_{lanes}_pct"] or "inf") for lanes in ("1_lane", "2_lanes", "3_lanes")]
        assert 100 * (one_lane - numel) / numel <= reached[0] + 1e-4, row
        assert 100 * (any_layout - numel) / numel <= min(reached) + 1e-4, row


def test_a_gap_that_no_search_closed_is_admitted() -> None:
    layout = lay_out(groups_of("deepseek-v3-671b")[2][1], "128", 192, 1)
    assert layout.lanes[0].bound < layout.share
    assert not layout.proved


def test_kinds_of_one_granularity_part_where_a_lane_would_need_one_block_more() -> None:
    # 32 rows over 192 ranks: w1, w3 and w2 share a lane of their common multiple, the attention has its own.
    shares = [lane.share for lane in lay_out(groups_of("llama3-8b")[1][1], "32", 192, 2).lanes]
    assert shares == [8 * 114688, 8 * 32768]


def test_two_lanes_pad_less_than_the_reference_in_each_class_of_cells_and_meet_the_targets() -> None:
    ours, theirs = defaultdict(list), defaultdict(list)
    for row in reference():
        cell = (row["rows"], float(row["any_layout_bound_pct"]) <= 3)
        ours[cell].append(padding_pct(row, 2))
        theirs[cell].append(float(row["reference_2_lanes_pct"] or row["reference_1_lane_pct"]))
    mean = {cell: sum(values) / len(values) for cell, values in ours.items()}
    assert {cell: pct for cell, pct in mean.items() if pct > sum(theirs[cell]) / len(theirs[cell])} == {}
    targets = {"1": 0.6, "16": 2.0, "32": 2.6, "128": 3.3}
    assert {rows: mean[rows, True] for rows, target in targets.items() if mean[rows, True] > target} == {}


@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-v3-671b"])
def test_two_lanes_pad_at_most_2_2_percent_at_one_row(model: str) -> None:
    cells = [row for row in reference() if row["model"] == model and row["rows"] == "1"]
    assert max(int(row["num_ranks"]) for row in cells) == 16384
    assert {row["num_ranks"]: pct for row in cells if (pct := padding_pct(row, 2)) > 2.2} == {}


def test_experts_part_from_the_family_that_needs_another_multiple() -> None:
    # 65 x 114688 hold 514 up and gate projections; 15 x 262144 = 160 x 24576 hold the down projections and attention.
    layout = lay_out(groups_of("deepseek-v3-671b")[2][1], "16", 1024, 2)
    assert [lane.share for lane in layout.lanes] == [65 * 114688, 15 * 262144]


@pytest.mark.parametrize("max_lanes", [2, 3])
def test_a_kind_that_holds_most_of_the_group_may_lie_in_two_lanes(max_lanes: int) -> None:
    # 128 rows over 768 ranks: the up and gate projections alone, 514 x 16 blocks of 114688, would need 11 of them per
    # rank, and what remains 24 x 262144: 16384000. The first lane's share is a multiple of both blocks.
    layout = lay_out(groups_of("deepseek-v3-671b")[2][1], "128", 768, max_lanes)
    assert [lane.share for lane in layout.lanes] == [128 * 114688, 3 * 262144]
    assert 128 * 114688 == 56 * 262144


def test_equal_tensors_may_lie_in_two_lanes() -> None:
    # Gate and up have 1152 blocks of 147456 each. The down projection needs a share of 8 blocks, 384 x 8 = 3072 of
    # which it leaves 1920: room for one of the two, and the other needs 3 blocks per rank.
    layout = lay_out(LAYERS["gemma-2-27b"], "32", 384, 2)
    assert [lane.share for lane in layout.lanes] == [8 * 147456, 3 * 147456]
    assert layout.lane_of[4] != layout.lane_of[5]


def test_experts_may_lie_in_several_lanes() -> None:
    # 22528 = 11 x 2048 = 16 x 1408 holds the down projections and half of the others, which alone need 12 x 2048 after
    # 10 x 1408. In three lanes 64 down projections fill 8 x 1408 of each rank exactly.
    two, three = (lay_out(LAYERS["deepseek-v2-lite"], "1", 16384, lanes) for lanes in (2, 3))
    assert [lane.share for lane in two.lanes] == [22528, 7 * 2048]
    assert [lane.share for lane in three.lanes] == [22528, 8 * 1408, 2048]


def test_norms_and_biases_leave_two_full_lanes_together() -> None:
    # Seven tiny kinds: as long as one of them is in a lane of matrices, that lane needs a block more on every rank.
    layout = lay_out(groups_of("vit-l16")[1][1], "16", 128, 3)
    assert [lane.share for lane in layout.lanes] == [65536, 32768, 112]


def test_at_16384_ranks_the_lanes_of_deepseek_v3_take_few_lower_bounds() -> None:
    shapes = groups_of("deepseek-v3-671b")[2][1]
    tensors = [(math.prod(shape), run := granularity(name, shape, "1"), run) for name, shape in shapes]
    problem = Problem.reduce(tensors, 16384, 8, 8)
    bounds = Bounds(problem)
    lay_out_lanes(problem, bounds, 3, 0)
    assert len(bounds.of_masks) + len(bounds.known) <= 300


def test_small_tensors_between_two_families_save_a_block() -> None:
    # What arXiv 2602.22437's order by shape reaches: the norms stand between up and down projections.
    assert lay_out(groups_of("mixtral-8x22b")[1][1], "16", 16, 1).share <= 156549120


def plan(shapes: Shapes, rows: int, num_ranks: int) -> GroupPlan:
    runs = [granularity(name, shape, str(rows)) if rows else 1 for name, shape in shapes]
    specs = [ParamSpec(*pair, "bfloat16", Granularity(run)) for pair, run in zip(shapes, runs, strict=True)]
    return plan_group(specs, num_ranks)


def test_by_default_lanes_open_for_what_is_gathered_not_for_what_a_rank_keeps() -> None:
    # A rank of 16,384 keeps 2.0 MiB of the layer in one buffer and 1.4 in two, and gathers 32 GiB or 22.
    layer = groups_of("deepseek-v3-671b")[2][1]
    group = plan(layer, 1, 16384)
    assert (len(group.lanes), group.padding_pct < 2.2) == (2, True)


@pytest.mark.parametrize("rows", [0, 1, 16, 128])
@pytest.mark.parametrize("model", LAYERS)
def test_other_models_are_planned_by_the_rules_and_close_to_their_bounds(model: str, rows: int) -> None:
    for num_ranks in RANKS:
        group = plan(LAYERS[model], rows, num_ranks)
        group.check()
        assert group.bound <= group.share
        if rows == 0:
            assert group.proved, (num_ranks, group.padding_pct, group.bound_pct)


def test_element_granularity_pads_at_most_what_rounding_to_16_bytes_costs() -> None:
    for shapes in LAYERS.values():
        for num_ranks in RANKS:
            group = plan(shapes, 0, num_ranks)
            rounded = sum(-(-spec.numel // 8) * 8 for spec in group.specs)
            assert group.share == -(-rounded // (8 * num_ranks)) * 8


def test_equal_groups_share_one_layout() -> None:
    specs = [[ParamSpec(f"layers.{i}.{name}", shape) for name, shape in LAYERS["vit-giant-14"]] for i in range(3)]
    made = make_plan([(f"layers.{i}", group) for i, group in enumerate(specs)], 24)
    assert len({id(group.layout) for group in made}) == 1
