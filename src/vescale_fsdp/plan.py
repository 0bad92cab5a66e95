"""Where every element goes, as a value: deterministic, hashable, comparable, printable, JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ragged_dtensor.granularity import Granularity
from ragged_dtensor.units import Units

from .errors import PlanError
from .layout import LanePlan, Layout, Span
from .spec import ParamSpec, itemsize_bits

__all__ = ["VERSION", "GroupPlan", "LanePlan", "Plan", "Span", "TensorPlan"]

VERSION = 1
"""Of the JSON format."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor's place: it starts at element `start` of the flat buffer (num_ranks equal shares) of lane `lane`."""

    spec: ParamSpec
    lane: int
    start: int


@dataclass(frozen=True)
class GroupPlan:
    """One communication group: its parameters in module order, all of one dtype, and the layout of their elements."""

    name: str
    specs: tuple[ParamSpec, ...]
    layout: Layout

    def __post_init__(self) -> None:
        if len(self.specs) != len(self.layout.starts):
            raise PlanError(f"{self.name}: {len(self.specs)} parameters, but a layout of {len(self.layout.starts)}")

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    @property
    def lanes(self) -> tuple[LanePlan, ...]:
        return self.layout.lanes

    @property
    def bound(self) -> int:
        """The least share per rank that any layout could have, in one buffer or many."""
        return self.layout.bound

    @property
    def proved(self) -> bool:
        """No plan with this number of lanes is smaller."""
        return self.layout.proved

    @property
    def share(self) -> int:
        """Elements per rank, all lanes together."""
        return self.layout.share

    @cached_property
    def dtype(self) -> str:
        return self.specs[0].dtype if self.specs else "float32"

    @cached_property
    def tensors(self) -> tuple[TensorPlan, ...]:
        return tuple(map(TensorPlan, self.specs, self.layout.lane_of, self.layout.starts))

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.numel for spec in self.specs)

    @property
    def padding(self) -> int:
        """Elements of the buffers, on all ranks together, that belong to no parameter."""
        return self.num_ranks * self.share - self.numel

    @property
    def padding_pct(self) -> float:
        return 100 * self.padding / self.numel if self.numel else 0.0

    @property
    def bound_pct(self) -> float:
        """The padding below which no layout can go."""
        return 100 * max(self.num_ranks * self.bound - self.numel, 0) / self.numel if self.numel else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that one rank holds, padding included, in the parameters' own dtype."""
        return -(-self.share * itemsize_bits(self.dtype) // 8)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {spec.fqn: position for position, spec in enumerate(self.specs)}

    def position(self, fqn: str) -> int:
        """Index of the parameter in `specs` and `tensors`."""
        try:
            return self._positions[fqn]
        except KeyError:
            raise PlanError(
                f"{fqn}: not a parameter of group {self.name!r}, which has {list(self._positions)[:8]} ..."
            ) from None

    def shard_range(self, fqn: str, rank: int) -> Span:
        """The flattened parameter's elements that `rank` owns; may be empty."""
        position = self.position(fqn)
        return self.layout.shard_range(position, self.specs[position].numel, rank)

    def local_offset(self, fqn: str, rank: int) -> int:
        """Where the elements of `shard_range` start inside the rank's share of their lane."""
        return self.layout.local_offset(self.position(fqn), rank)

    def units(self, fqn: str) -> Units:
        """Elements per rank, reduced by their gcd: what RaggedShard takes as `local_units`."""
        position = self.position(fqn)
        return self.layout.units(position, self.specs[position].numel)

    def check(self) -> None:
        """Raise PlanError unless every rule of the planner holds."""
        names = [spec.fqn for spec in self.specs]
        self.layout.check(names, [spec.numel for spec in self.specs], [spec.granularity.numel for spec in self.specs])


@dataclass(frozen=True)
class Plan:
    """All groups of a model, in module order."""

    groups: tuple[GroupPlan, ...]

    def __iter__(self) -> Iterator[GroupPlan]:
        return iter(self.groups)

    @property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)

    @property
    def padding(self) -> int:
        return sum(group.padding for group in self.groups)

    @property
    def padding_pct(self) -> float:
        return 100 * self.padding / self.numel if self.numel else 0.0

    @property
    def bound_pct(self) -> float:
        """The padding below which no layout of these groups can go."""
        least = sum(max(group.num_ranks * group.bound - group.numel, 0) for group in self.groups)
        return 100 * least / self.numel if self.numel else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that one rank holds, padding included, in the parameters' own dtypes."""
        return sum(group.nbytes for group in self.groups)

    @property
    def proved(self) -> bool:
        return all(group.proved for group in self.groups)

    def check(self) -> None:
        """Raise PlanError unless every rule of the planner holds in every group."""
        for group in self.groups:
            group.check()

    def to_json(self, *, indent: int | None = None) -> str:
        """One spelling per plan: equal plans give equal text."""
        value = {"version": VERSION, "groups": [_group_to_json(group) for group in self.groups]}
        return json.dumps(value, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote and check it; PlanError names the entry that is wrong."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"a plan is JSON: {error}") from None
        if not isinstance(value, dict) or value.get("version") != VERSION:
            found = value.get("version") if isinstance(value, dict) else type(value).__name__
            raise PlanError(f"expected a plan of version {VERSION}, got {found!r}")
        groups = value.get("groups")
        if not isinstance(groups, list):
            raise PlanError(f"groups: expected a list of group plans, got {type(groups).__name__}")
        plan = cls(tuple(_group_from_json(index, group) for index, group in enumerate(groups)))
        plan.check()
        return plan

    def digest(self) -> str:
        """Hexadecimal SHA-256 of the plan; equal on every rank, run and Python hash seed."""
        lines = (line for group in self.groups for line in _digested(group))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What differs, one line each, in plan order; empty when the plans are equal."""
        if len(self.groups) != len(other.groups):
            return (f"{len(self.groups)} groups != {len(other.groups)} groups",)
        return tuple(
            line for mine, theirs in zip(self.groups, other.groups, strict=True) for line in _diff(mine, theirs)
        )

    def explain(self) -> str:
        """The plan in words: groups, lanes, padding, lower bound, and who asked for what."""
        total = f"{_counted(len(self.groups), 'group')}, {self.numel:,} elements, padding {self.padding_pct:.4f} %"
        head = f"{total} (no layout below {self.bound_pct:.4f} %), {self.nbytes:,} bytes per rank"
        return "\n".join([head, *(_explain(group) for group in self.groups)])


def _digested(group: GroupPlan) -> Iterator[str]:
    """Everything that tells plans apart, in fewer steps than JSON takes: wrapping waits for it."""
    yield repr((VERSION, group.name, group.layout))
    for spec in group.specs:
        yield f"{spec.fqn!r} {spec.shape} {spec.dtype} {spec.granularity.numel} {spec.granularity.reasons}"


def _group_to_json(group: GroupPlan) -> dict[str, Any]:
    layout = group.layout
    return {
        "name": group.name,
        "num_ranks": layout.num_ranks,
        "unit": layout.unit,
        "align": layout.align,
        "bound": layout.bound,
        "proved": layout.proved,
        "lanes": [{"share": lane.share, "bound": lane.bound} for lane in layout.lanes],
        "tensors": [
            {
                "fqn": spec.fqn,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "granularity": spec.granularity.numel,
                "reasons": list(spec.granularity.reasons),
                "lane": lane,
                "start": start,
            }
            for spec, lane, start in zip(group.specs, layout.lane_of, layout.starts, strict=True)
        ],
    }


def _group_from_json(index: int, value: Mapping[str, Any]) -> GroupPlan:
    try:
        tensors = value["tensors"]
        layout = Layout(
            num_ranks=_whole(value["num_ranks"]),
            unit=_whole(value["unit"]),
            align=_whole(value["align"]),
            lanes=tuple(LanePlan(_whole(lane["share"]), _whole(lane["bound"])) for lane in value["lanes"]),
            lane_of=tuple(_whole(tensor["lane"]) for tensor in tensors),
            starts=tuple(_whole(tensor["start"]) for tensor in tensors),
            bound=_whole(value["bound"]),
        )
        return GroupPlan(str(value["name"]), tuple(map(_spec_from_json, tensors)), layout)
    except (KeyError, TypeError, ValueError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"groups[{index}]: {what}") from None


def _spec_from_json(value: Mapping[str, Any]) -> ParamSpec:
    granularity = Granularity(_whole(value["granularity"]), tuple(map(str, value["reasons"])))
    return ParamSpec(str(value["fqn"]), tuple(map(_whole, value["shape"])), str(value["dtype"]), granularity)


def _whole(value: object) -> int:
    """JSON's 3.7 and true are no counts of elements."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"expected a whole number, got {value!r}")
    return value


def _diff(mine: GroupPlan, theirs: GroupPlan) -> Iterator[str]:
    if mine == theirs:
        return
    for field in ("name", "num_ranks", "dtype"):
        if getattr(mine, field) != getattr(theirs, field):
            yield f"{mine.name}: {field} {getattr(mine, field)!r} != {getattr(theirs, field)!r}"
    for field in ("unit", "align", "lanes", "bound"):
        if getattr(mine.layout, field) != getattr(theirs.layout, field):
            yield f"{mine.name}: {field} {getattr(mine.layout, field)} != {getattr(theirs.layout, field)}"
    if len(mine.specs) != len(theirs.specs):
        yield f"{mine.name}: {len(mine.specs)} parameters != {len(theirs.specs)} parameters"
    for one, two in zip(mine.tensors, theirs.tensors, strict=False):
        if one.spec.fqn != two.spec.fqn:
            yield f"{mine.name}: parameter {one.spec.fqn} != {two.spec.fqn}"
            continue
        for field in ("shape", "dtype", "granularity"):
            if getattr(one.spec, field) != getattr(two.spec, field):
                yield f"{one.spec.fqn}: {field} {getattr(one.spec, field)} != {getattr(two.spec, field)}"
        if (one.lane, one.start) != (two.lane, two.start):
            yield f"{one.spec.fqn}: start {one.start} in lane {one.lane} != {two.start} in lane {two.lane}"


def _explain(group: GroupPlan) -> str:
    state = _state(group)
    size = f"{_counted(len(group.specs), 'parameter')}, {group.numel:,} x {group.dtype} over {group.num_ranks} ranks"
    padding = f"padding {group.padding_pct:.4f} % (no layout below {group.bound_pct:.4f} %)"
    lines = [f"{group.name or 'group'}: {size}, {padding}, {state}"]
    for index, lane in enumerate(group.lanes):
        members = [tensor for tensor in group.tensors if tensor.lane == index and tensor.spec.numel]
        end = max((tensor.start + tensor.spec.numel for tensor in members), default=0)
        empty = group.num_ranks - (-(-end // lane.share) if lane.share else 0)
        note = f", {_last_ranks(empty)} nothing" if empty else ""
        lines.append(f"  lane {index}: {_counted(len(members), 'parameter')}, {lane.share:,} elements per rank{note}")
    asked: dict[str, list[str]] = {}
    for spec in group.specs:
        for reason in spec.granularity.reasons:
            asked.setdefault(reason, []).append(spec.fqn)
    for reason, fqns in asked.items():
        more = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
        lines.append(f"  {fqns[0]}{more}: {reason}")
    return "\n".join(lines)


def _last_ranks(count: int) -> str:
    return "the last rank holds" if count == 1 else f"the last {count} ranks hold"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _state(group: GroupPlan) -> str:
    if group.share == group.bound:
        return "proved optimal"
    if group.proved:
        return "proved optimal in one lane"
    return f"{_gap_pct(group):.4f} % above the lower bound, not proved optimal"


def _gap_pct(group: GroupPlan) -> float:
    bound = group.lanes[0].bound if len(group.lanes) == 1 else group.bound
    return 100 * (group.share - bound) / bound if bound else 0.0
