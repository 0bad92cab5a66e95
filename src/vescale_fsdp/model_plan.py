"""A whole model's plan with equal groups written once, and what it says of itself as text and JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from .plan import GroupPlan, Plan
from .planner import plan_group
from .shapes import ModelShapes, ShapeGroup

__all__ = ["ModelPlan", "PlannedGroup", "plan_model"]

VERSION = 1
"""Of the JSON report."""


@dataclass(frozen=True)
class PlannedGroup:
    """The plan of a group's first copy; the other copies have the same one."""

    shapes: ShapeGroup
    plan: GroupPlan

    @property
    def count(self) -> int:
        return self.shapes.count


@dataclass(frozen=True)
class ModelPlan:
    """Every group of a model over the same ranks; totals count all copies. `seconds` is how long planning took."""

    shapes: ModelShapes
    num_ranks: int
    groups: tuple[PlannedGroup, ...]
    seconds: float = field(default=0.0, compare=False)

    @property
    def numel(self) -> int:
        return self.shapes.numel

    @property
    def padding(self) -> int:
        """Elements on all ranks together that belong to no parameter."""
        return sum(group.plan.padding * group.count for group in self.groups)

    @property
    def padding_pct(self) -> float:
        return 100 * self.padding / self.numel if self.numel else 0.0

    @property
    def bound_pct(self) -> float:
        """The padding below which no layout of these groups can go."""
        return sum(g.plan.bound_pct * g.plan.numel * g.count for g in self.groups) / self.numel if self.numel else 0.0

    @property
    def share(self) -> int:
        """Elements per rank, padding included."""
        return sum(group.plan.share * group.count for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes per rank in the parameters' own dtypes, padding included."""
        return sum(group.plan.nbytes * group.count for group in self.groups)

    @property
    def proved(self) -> bool:
        return all(group.plan.proved for group in self.groups)

    def explain(self) -> str:
        """The model in one line, then each group in the words of its plan."""
        copies = sum(group.count for group in self.groups)
        lines = [
            f"{self.shapes.model}: {copies} groups, {self.numel:,} elements over {self.num_ranks} ranks, padding "
            f"{self.padding_pct:.4f} % (no layout below {self.bound_pct:.4f} %), {self.nbytes:,} bytes per rank"
        ]
        for group in self.groups:
            lines += Plan((group.plan,)).explain().splitlines()[1:]
            if group.count > 1:
                lines.append(f"  {group.count} groups are alike: {group.shapes.name}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """A report for programs; `Plan.to_json` is what a plan is stored as."""
        value = {
            "version": VERSION,
            "model": self.shapes.model,
            "source": self.shapes.source,
            "num_ranks": self.num_ranks,
            "numel": self.numel,
            "padding_pct": self.padding_pct,
            "bound_pct": self.bound_pct,
            "proved": self.proved,
            "nbytes_per_rank": self.nbytes,
            "seconds": self.seconds,
            "groups": [_group_value(group) for group in self.groups],
        }
        return json.dumps(value, indent=1) + "\n"


def plan_model(shapes: ModelShapes, num_ranks: int, *, max_lanes: int | None = None) -> ModelPlan:
    """Plan one copy of every group."""
    begin = time.perf_counter()
    plans = [
        plan_group(g.specs, num_ranks, name=g.prefixes[0], unit=g.unit, align=g.unit, max_lanes=max_lanes)
        for g in shapes.groups
    ]
    seconds = time.perf_counter() - begin
    return ModelPlan(shapes, num_ranks, tuple(map(PlannedGroup, shapes.groups, plans)), seconds)


def _group_value(group: PlannedGroup) -> dict[str, object]:
    plan = group.plan
    return {
        "name": group.shapes.name,
        "count": group.count,
        "dtype": plan.dtype,
        "numel": plan.numel,
        "share": plan.share,
        "bound": plan.bound,
        "padding_pct": plan.padding_pct,
        "bound_pct": plan.bound_pct,
        "proved": plan.proved,
        "lanes": [{"share": lane.share, "bound": lane.bound} for lane in plan.lanes],
        "tensors": list(_tensor_values(plan)),
    }


def _tensor_values(plan: GroupPlan) -> Iterator[dict[str, object]]:
    for tensor in plan.tensors:
        spec = tensor.spec
        yield {
            "fqn": spec.fqn,
            "shape": spec.shape,
            "granularity": spec.granularity.numel,
            "reasons": spec.granularity.reasons,
            "lane": tensor.lane,
            "start": tensor.start,
        }
