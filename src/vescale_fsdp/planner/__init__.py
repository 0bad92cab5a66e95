"""Where each parameter's elements go: specs in, Plan out.

Reading order: problem, greedy, bounds, classes, orders, one_lane. Integers only: no torch, no process group, no clock, so
every rank finds the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..errors import PlanError
from ..layout import LanePlan, Layout
from ..plan import GroupPlan, Plan
from ..spec import ParamSpec, alignment
from .bounds import any_layout_bound
from .greedy import starts_of
from .one_lane import lay_out
from .problem import Problem

__all__ = ["make_plan", "plan_group"]


def make_plan(
    groups: Iterable[tuple[str, Sequence[ParamSpec]]],
    num_ranks: int,
    *,
    unit: int | None = None,
    align: int | None = None,
    max_lanes: int | None = None,
) -> Plan:
    """Plan every (name, parameters) group over the same number of ranks; equal groups are solved once."""
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

    Shares are multiples of `unit` elements and starts of `align`; both default to 16 bytes in the parameters' dtype. Pass
    `alignment(...)` of all dtypes that the layout will ever hold when some are smaller. `max_lanes`: None opens a second
    buffer only where that saves at least 0.5 % and 1 MiB per rank; 1, 2 or 3 allow as many.
    """
    _refuse_mixed(name, specs)
    default = alignment({spec.dtype for spec in specs}) if specs else 1
    layout = _lay_out(
        tuple([spec.numel for spec in specs]),
        tuple([spec.granularity.numel for spec in specs]),
        num_ranks,
        default if unit is None else unit,
        default if align is None else align,
    )
    return GroupPlan(name, tuple(specs), layout)


def _refuse_mixed(name: str, specs: Sequence[ParamSpec]) -> None:
    for spec in specs:
        if spec.dtype != specs[0].dtype:
            raise PlanError(
                f"{spec.fqn}: {spec.dtype} in group {name!r} of {specs[0].dtype}. One group holds one dtype; plan it apart."
            )
    if len({spec.fqn for spec in specs}) != len(specs):
        raise PlanError(f"group {name!r} names a parameter twice")


@lru_cache(maxsize=4096)
def _lay_out(numels: tuple[int, ...], granularities: tuple[int, ...], num_ranks: int, unit: int, align: int) -> Layout:
    if num_ranks < 1 or unit < 1 or align < 1:
        raise PlanError(f"num_ranks, unit and align are >= 1, got {num_ranks}, {unit} and {align}")
    problem = Problem.reduce(numels, granularities, num_ranks, unit, align)
    lane = lay_out(problem)
    pools: list[list[int]] = [[] for _ in problem.kinds]
    for index, start in starts_of(lane.order, problem.kinds, lane.spans_ranks, lane.share):
        pools[index].append(start * align)
    queues = [iter(pool) for pool in pools]
    kind_of = {
        pair: i for i, pair in enumerate(dict.fromkeys(p for p in zip(numels, granularities, strict=True) if p[0]))
    }
    starts = tuple(next(queues[kind_of[pair]]) if pair[0] else 0 for pair in zip(numels, granularities, strict=True))
    return Layout(
        num_ranks,
        unit,
        align,
        (LanePlan(lane.share * align, lane.bound * align),),
        (0,) * len(numels),
        starts,
        any_layout_bound(problem) * align,
    )
