"""Plans as values: ranges against slicing, JSON, digest, differences, words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.errors import PlanError
from vescale_fsdp.layout import LanePlan, Layout, Span
from vescale_fsdp.plan import GroupPlan, Plan
from vescale_fsdp.planner import make_plan, plan_group
from vescale_fsdp.spec import ParamSpec, alignment

SPECS = (
    ParamSpec("norm", (6,)),
    ParamSpec("w1", (12, 4), granularity=Granularity(8, ("2 rows (somebody)",))),
    ParamSpec("none", (0, 4)),
    ParamSpec("w2", (5, 3)),
    ParamSpec("scale", ()),
)


def plan(num_ranks: int = 3) -> Plan:
    return make_plan([("layers.0", SPECS), ("head", SPECS[1:2])], num_ranks, unit=4, align=4)


def groups() -> st.SearchStrategy[list[ParamSpec]]:
    def spec(index: int, shape: tuple[int, ...], run: int) -> ParamSpec:
        return ParamSpec(f"p{index}", shape, granularity=Granularity(run))

    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    pairs = st.lists(st.tuples(shapes, st.integers(1, 12)), min_size=1, max_size=7)
    return pairs.map(lambda pairs: [spec(i, shape, run) for i, (shape, run) in enumerate(pairs)])


@settings(max_examples=200, deadline=None)
@given(groups(), st.integers(1, 9), st.sampled_from([1, 2, 3, None]))
def test_ranges_offsets_and_units_agree_with_slicing_the_buffers(
    specs: list[ParamSpec], num_ranks: int, max_lanes: int | None
) -> None:
    group = plan_group(specs, num_ranks, max_lanes=max_lanes)
    for tensor in group.tensors:
        fqn, share = tensor.spec.fqn, group.lanes[tensor.lane].share
        owners = [(tensor.start + element) // share for element in range(tensor.spec.numel)]
        pieces = [owners.count(rank) for rank in range(num_ranks)]
        assert [len(group.shard_range(fqn, rank)) for rank in range(num_ranks)] == pieces
        for rank in range(num_ranks):
            span, offset = group.shard_range(fqn, rank), group.local_offset(fqn, rank)
            assert 0 <= offset <= offset + len(span) <= share
            if len(span):
                assert rank * share + offset == tensor.start + span.begin
        units = group.units(fqn)
        assert len(units) == num_ranks
        if tensor.spec.numel:
            assert [unit * tensor.spec.numel for unit in units] == [piece * units.total for piece in pieces]
        else:
            assert tuple(units) == (1, *[0] * (num_ranks - 1))


@settings(max_examples=100, deadline=None)
@given(groups(), st.integers(1, 9))
def test_json_brings_the_same_plan_back(specs: list[ParamSpec], num_ranks: int) -> None:
    made = make_plan([("g", specs)], num_ranks)
    again = Plan.from_json(made.to_json())
    assert (again, hash(again), again.digest(), again.diff(made)) == (made, hash(made), made.digest(), ())


def test_sizes_count_padding_on_all_ranks() -> None:
    group = plan_group([ParamSpec("a", (5,)), ParamSpec("b", (2,))], 2, unit=4, align=4)
    assert (group.share, group.numel, group.padding, group.nbytes) == (8, 7, 9, 32)
    assert group.padding_pct == pytest.approx(100 * 9 / 7)


def test_an_element_is_found_in_constant_time_at_any_number_of_ranks() -> None:
    group = plan_group([ParamSpec("a", (1 << 20, 1 << 14))], 16_384)
    assert group.shard_range("a", 16_383) == Span((1 << 34) - (1 << 20), 1 << 34)
    assert group.units("a").runs == ((1, 16_384),)


def test_an_unknown_parameter_or_rank_is_named() -> None:
    group = plan().groups[0]
    with pytest.raises(PlanError, match=r"w9: not a parameter of group 'layers.0', which has"):
        group.units("w9")
    with pytest.raises(PlanError, match="rank 3 is not one of 3"):
        group.shard_range("w1", 3)


def test_differences_name_the_parameter_and_both_values() -> None:
    mine, theirs = plan(3), plan(4)
    assert mine.digest() != theirs.digest()
    assert mine.diff(theirs)[0] == "layers.0: num_ranks 3 != 4"
    renamed = replace(SPECS[1], fqn="w9")
    other = make_plan([("layers.0", (SPECS[0], renamed, *SPECS[2:])), ("head", SPECS[1:2])], 3, unit=4, align=4)
    assert mine.diff(other) == ("layers.0: parameter w1 != w9",)
    assert mine.diff(Plan(mine.groups[:1])) == ("2 groups != 1 groups",)


def test_the_explanation_says_who_asked_what_is_proved_and_who_holds_nothing() -> None:
    text = make_plan([("block", SPECS)], 40, unit=4, align=4).explain()
    assert "w1: 2 rows (somebody)" in text
    assert "proved optimal" in text
    assert "ranks hold nothing" in text


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "expected a plan of version 1, got 2"),
        (("groups", 0, "num_ranks"), 0, r"groups\[0\]: num_ranks, unit and align are >= 1"),
        (("groups", 0, "tensors", 1, "start"), 3, "w1: starts at 3"),
        (("groups", 0, "tensors", 3, "start"), 4000, "w2: ends at 4015, behind the"),
        (("groups", 0, "tensors", 1, "granularity"), 7, "w1: cut .* splits a block of 7"),
        (("groups", 0, "tensors", 1, "lane"), 1, "w1: lies in lane 1, but there are 1"),
        (("groups", 0, "tensors", 1, "dtype"), "fp32", "w1: unknown dtype 'fp32'"),
        (("groups", 0, "lanes"), [], "has a lane"),
        (("groups", 0, "bound"), "many", r"groups\[0\]: expected a whole number"),
    ],
)
def test_a_broken_plan_names_the_entry(path: tuple[str | int, ...], value: object, message: str) -> None:
    data = json.loads(plan().to_json())
    entry = data
    for step in path[:-1]:
        entry = entry[step]
    entry[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("entry", "value"), [("lane", 1), ("lane", 10**30), ("lane", -1), ("start", -4), ("start", 99)]
)
def test_an_empty_tensor_lies_in_a_lane_too(entry: str, value: int) -> None:
    data = json.loads(make_plan([("g", [ParamSpec("w", (8,)), ParamSpec("none", (0, 3))])], 2).to_json())
    data["groups"][0]["tensors"][1][entry] = value
    with pytest.raises(PlanError, match="none: "):
        Plan.from_json(json.dumps(data))


def test_a_missing_entry_is_named() -> None:
    data = json.loads(plan().to_json())
    del data["groups"][1]["unit"]
    with pytest.raises(PlanError, match=r"groups\[1\]: no entry 'unit'"):
        Plan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match="a plan is JSON"):
        Plan.from_json("{")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "a plan is JSON"),
        ('{"version": 1}', "groups: expected a list"),
        ('{"version": 1, "groups": 5}', "groups: expected a list"),
        (plan().to_json().replace('"start": 0', '"start": 1e999'), r"groups\[0\]: expected a whole number, got inf"),
        (plan().to_json().replace('"unit": 4', '"unit": 4.5'), r"groups\[0\]: expected a whole number, got 4.5"),
        (plan().to_json().replace('"unit": 4', '"unit": true'), r"groups\[0\]: expected a whole number, got True"),
    ],
)
def test_what_is_no_plan_is_a_plan_error(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_one_of_a_kind_is_explained_in_the_singular() -> None:
    text = make_plan([("block", [ParamSpec("a", (8,))])], 3).explain()
    assert text.startswith("1 group, ")
    assert text.endswith("lane 0: 1 parameter, 4 elements per rank, the last rank holds nothing")


def test_the_checker_refuses_overlap() -> None:
    layout = Layout(2, 1, 1, (LanePlan(4, 4),), (0, 0), (0, 3), 4)
    with pytest.raises(PlanError, match="b: starts at 3, but a ends at 4"):
        GroupPlan("g", (ParamSpec("a", (4,)), ParamSpec("b", (4,))), layout).check()


def test_the_checker_refuses_cuts_that_only_the_second_boundary_makes_illegal() -> None:
    layout = Layout(3, 1, 1, (LanePlan(4, 4),), (0,), (1,), 4)  # cuts after 3 and 7 elements
    with pytest.raises(PlanError, match="a: cut every 4 elements, which splits a block of 3"):
        GroupPlan("g", (ParamSpec("a", (9,), granularity=Granularity(3)),), layout).check()


def test_a_group_holds_one_dtype_and_each_name_once() -> None:
    with pytest.raises(PlanError, match="b: bfloat16 in group 'g' of float32"):
        plan_group([ParamSpec("a", (4,)), ParamSpec("b", (4,), "bfloat16")], 2, name="g")
    with pytest.raises(PlanError, match="group 'g' names a parameter twice"):
        plan_group([ParamSpec("a", (4,)), ParamSpec("a", (4,))], 2, name="g")


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="max_lanes is None or 1 to 3, got 4"):
        plan_group(SPECS, 2, max_lanes=4)
    with pytest.raises(PlanError, match=r"a: sizes are >= 0, got shape \(2, -1\)"):
        ParamSpec("a", (2, -1))


@pytest.mark.parametrize("name", ["num_ranks", "unit", "align", "max_lanes"])
@pytest.mark.parametrize("value", [2.0, True, 0, -2, "2", None])
def test_what_is_no_count_is_refused_even_where_an_equal_count_was_planned(name: str, value: object) -> None:
    counts: dict[str, object] = {"num_ranks": 2, "unit": 1, "align": 1, "max_lanes": 1}
    plan_group(SPECS, **counts)  # type: ignore[arg-type]
    plan_group(SPECS, **counts | {name: 1})  # type: ignore[arg-type]
    if value is None and name != "num_ranks":
        return
    with pytest.raises(PlanError, match=f"{name} is a whole number >= 1, got {value!r}"):
        plan_group(SPECS, **counts | {name: value})  # type: ignore[arg-type]


def test_a_plan_of_no_groups_asks_for_ranks_too() -> None:
    with pytest.raises(PlanError, match="num_ranks is a whole number >= 1, got 0"):
        make_plan([], 0)


def test_a_group_without_parameters_needs_no_bytes() -> None:
    group = plan_group([], 4)
    assert (group.share, group.padding, group.proved, group.nbytes) == (0, 0, True, 0)


@pytest.mark.parametrize(
    ("dtypes", "elements"),
    [
        (["float32"], 4),
        (["float32", "bfloat16"], 8),
        (["bfloat16", "float8_e4m3fn"], 16),
        (["float32", "float4_e2m1fn_x2"], 32),
        (["float6_e2m3fn"], 64),
        (["complex128"], 1),
    ],
)
def test_alignment_fills_16_bytes_of_every_dtype(dtypes: list[str], elements: int) -> None:
    assert alignment(dtypes) == elements
