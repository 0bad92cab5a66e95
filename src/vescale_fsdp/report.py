"""What a wrapped model consists of and what it moved: `report(module)` as a value, `explain(module)` as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .errors import VescaleError
from .group import ParamGroup
from .plan import GroupPlan, Plan
from .state import find_state
from .traffic import Traffic

__all__ = ["GroupReport", "ModelReport", "Traffic", "explain", "report", "traffic"]


@dataclass(frozen=True)
class GroupReport:
    """One communication group. Bytes are of the stored dtype for the shard, of the compute dtype for the whole."""

    plan: GroupPlan
    shard_nbytes: int
    whole_nbytes: int
    reshard_after_forward: bool | int

    @property
    def name(self) -> str:
        return self.plan.name


@dataclass(frozen=True)
class ModelReport:
    """A model's groups in module order, and what it moved since it was wrapped (before the first forward: nothing)."""

    groups: tuple[GroupReport, ...]
    traffic: Traffic

    @property
    def plan(self) -> Plan:
        return Plan(tuple(group.plan for group in self.groups))

    @property
    def padding_pct(self) -> float:
        return self.plan.padding_pct

    @property
    def shard_nbytes(self) -> int:
        """Bytes of parameters that this rank keeps."""
        return sum(group.shard_nbytes for group in self.groups)

    def __str__(self) -> str:
        lines = [f"{'group':<32} {'ranks':>5} {'dtype':>9} {'parameters':>12} {'shard MiB':>10} {'padding %':>9} lanes"]
        for group in self.groups:
            plan = group.plan
            lines.append(
                f"{plan.name or 'root':<32} {plan.num_ranks:>5} {plan.dtype:>9} {plan.numel:>12,} "
                f"{group.shard_nbytes / 2**20:>10.3f} {plan.padding_pct:>9.2f} {len(plan.lanes):>5}"
            )
        moved = self.traffic
        lines.append(
            f"moved: {moved.gathers} gathers, {moved.reduces} reduce-scatters, {moved.all_reduces} all-reduces, "
            f"{moved.wire_bytes / 2**20:.3f} MiB received, {moved.copied_bytes / 2**20:.3f} MiB copied around them"
        )
        return "\n".join(lines)


def report(module: nn.Module) -> ModelReport:
    """Describe a model that `fully_shard` wrapped, or that holds wrapped modules."""
    groups = tuple(_describe(group) for group in _groups(module))
    return ModelReport(groups, traffic(module))


def traffic(module: nn.Module) -> Traffic:
    """What the model moved since it was wrapped; subtract two of these to get a step."""
    counters = {id(group.traffic): group.traffic for group in _groups(module)}
    total = Traffic()
    for counter in counters.values():
        total = total + counter
    return total


def explain(module: nn.Module) -> str:
    """The report as a table: groups, bytes, padding, collectives."""
    return str(report(module))


def _groups(module: nn.Module) -> list[ParamGroup]:
    states = dict.fromkeys(state for each in module.modules() if (state := find_state(each)) is not None)
    if not states:
        raise VescaleError(f"{type(module).__name__} holds no module that vescale_fsdp.fully_shard wrapped")
    return [group for state in states for group in state.groups]


def _describe(group: ParamGroup) -> GroupReport:
    shard = group.shards.buffer
    whole_nbytes = group.mesh.num_ranks * shard.flat.numel() * group.compute_dtype.itemsize
    return GroupReport(group.plan, shard.nbytes, whole_nbytes, group.reshard_after_forward)
