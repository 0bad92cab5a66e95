"""Groups of parameters in, plans out: specs are read, equal groups are solved once, lanes are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import SupportsIndex

from ..errors import PlanError
from ..layout import LanePlan, Layout
from ..plan import GroupPlan, Plan
from ..spec import ParamSpec, alignment, itemsize_bits
from .bounds import SHARP, Bounds
from .lanes import Lane, lay_out_lanes, total
from .problem import Problem, Tensor
from .rows import place

__all__ = ["MAX_LANES", "lay_out_group", "make_plan", "plan_group"]

MAX_LANES = 3

MIN_SAVING_BITS = 8 << 20
"""1 MiB of what every rank holds while the group is gathered: where nobody asked for more lanes, one more has to save
this much, and 0.5 %."""


def make_plan(
    groups: Iterable[tuple[str, Sequence[ParamSpec]]],
    num_ranks: int,
    *,
    unit: int | None = None,
    align: int | None = None,
    max_lanes: int | None = None,
) -> Plan:
    """Plan every (name, parameters) group over the same number of ranks; equal groups are solved once."""
    num_ranks = _count("num_ranks", num_ranks)
    return Plan(
        tuple(
            plan_group(specs, num_ranks, name=name, unit=unit, align=align, max_lanes=max_lanes)
            for name, specs in groups
        )
    )


def plan_group(
    specs: Sequence[ParamSpec],
    num_ranks: int,
    *,
    name: str = "",
    unit: int | None = None,
    align: int | None = None,
    max_lanes: int | None = None,
) -> GroupPlan:
    """Plan one communication group, whose parameters share one dtype.

    Shares are multiples of `unit` elements and starts of `align`; both default to 16 bytes in the parameters' dtype:
    pass `alignment(...)` of all dtypes that the layout will ever hold if some are smaller. The fewest lanes within
    0.5 % of the best are taken, at most `max_lanes` (1 to 3); if None, one more has to save 1 MiB of the gathered
    group (all shares together) as well.
    """
    _refuse_mixed(name, specs)
    if max_lanes is not None and _count("max_lanes", max_lanes) > MAX_LANES:
        raise PlanError(f"max_lanes is None or 1 to {MAX_LANES}, got {max_lanes}")
    dtype = specs[0].dtype if specs else "float32"
    layout = lay_out_group(
        tuple([(spec.numel, spec.granularity.numel, spec.row) for spec in specs]),
        _count("num_ranks", num_ranks),
        alignment([dtype]) if unit is None else _count("unit", unit),
        alignment([dtype]) if align is None else _count("align", align),
        MAX_LANES if max_lanes is None else max_lanes,
        -(-MIN_SAVING_BITS // itemsize_bits(dtype)) if max_lanes is None else 0,
    )
    return GroupPlan(name, tuple(specs), layout)


def _count(name: str, value: object) -> int:
    """2.0 and True are equal to counts, and would find their plans, but are none."""
    if type(value) is int and value >= 1:
        return value
    if not isinstance(value, SupportsIndex) or isinstance(value, bool) or index(value) < 1:
        raise PlanError(f"{name} is a whole number >= 1, got {value!r}")
    return index(value)


def _refuse_mixed(name: str, specs: Sequence[ParamSpec]) -> None:
    if len({spec.dtype for spec in specs}) > 1:
        spec = next(spec for spec in specs if spec.dtype != specs[0].dtype)
        raise PlanError(f"{spec.fqn}: {spec.dtype} in group {name!r} of {specs[0].dtype}. A group holds one dtype.")
    if len({spec.fqn for spec in specs}) != len(specs):
        raise PlanError(f"group {name!r} names a parameter twice")


@lru_cache(maxsize=4096)
def lay_out_group(
    tensors: tuple[Tensor, ...], num_ranks: int, unit: int, align: int, max_lanes: int, min_saving: int
) -> Layout:
    """The layout of tensors given by (elements, granularity, row), checked.

    One more lane must save `min_saving` elements of all shares together.
    """
    problem = Problem.reduce(tensors, num_ranks, unit, align)
    bounds = Bounds(problem)
    lanes = lay_out_lanes(problem, bounds, max_lanes, -(-min_saving // (align * num_ranks)))
    lane_of, starts = _by_tensor(problem, lanes, [not numel for numel, _, _ in tensors], align)
    lane_plans = tuple(LanePlan(lane.layout.share * align, lane.layout.bound * align) for lane in lanes)
    layout = Layout(num_ranks, unit, align, lane_plans, lane_of, starts, _bound(bounds, lanes) * align)
    layout.check(
        range(len(tensors)), [numel for numel, _, _ in tensors], [granularity for _, granularity, _ in tensors]
    )
    return layout


def _bound(bounds: Bounds, lanes: Sequence[Lane]) -> int:
    """The any-layout bound, computed as sharply as it matters."""
    bound = bounds.any_layout()
    return bound if bound == total(lanes) else bounds.any_layout(SHARP)


def _by_tensor(
    problem: Problem, lanes: Sequence[Lane], is_empty: Sequence[bool], align: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lane and start of each tensor: equal tensors take their places in module order."""
    lane_of: list[list[int]] = [[] for _ in problem.kinds]
    starts: list[list[int]] = [[] for _ in problem.kinds]
    for lane_index, lane in enumerate(lanes):
        kinds = lane.kinds
        for kind, start, count in place(lane.problem, lane.layout):
            step = lane.problem.kinds[kind].numel * align
            lane_of[kinds[kind]] += [lane_index] * count
            starts[kinds[kind]] += range(start * align, start * align + count * step, step)
    next_place = [zip(*equal, strict=True).__next__ for equal in zip(lane_of, starts, strict=True)]
    filled = iter([next_place[kind]() for kind in problem.kinds_of_module])
    placed = [(0, 0) if empty else next(filled) for empty in is_empty]
    return tuple([lane for lane, _ in placed]), tuple([start for _, start in placed])
