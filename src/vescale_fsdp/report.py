"""What a wrapped model consists of and what it moved: `report(module)` as a value, `explain(module)` as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .errors import VescaleError
from .footprint import footprint_of_group
from .group.param_group import ParamGroup
from .group.traffic import Traffic
from .plan import GroupPlan, Plan
from .state import ModuleState, find_state
from .step_memory import footprint_of_step

__all__ = ["GroupReport", "ModelReport", "Traffic", "explain", "report", "traffic"]


@dataclass(frozen=True)
class GroupReport:
    """One communication group. Bytes are of the stored dtype for the shard, of the compute dtype for the whole.

    `peak_nbytes_bound`: the most that a rank holds of it at once: parameters, gradients and buffers of collectives.
    """

    plan: GroupPlan
    shard_nbytes: int
    whole_nbytes: int
    reshard_after_forward: bool | int
    peak_nbytes_bound: int | None = None

    @property
    def name(self) -> str:
        return self.plan.name


@dataclass(frozen=True)
class ModelReport:
    """A model's groups in module order, and what it moved since it was wrapped (before the first forward: nothing).

    The two peaks are bytes of one rank at the fullest moment of a step that synchronises gradients and begins without
    any: shards, gathered parameters, gradients and buffers of collectives, without activations and optimizer states.
    `peak_nbytes_bound` is never exceeded; `peak_nbytes` takes parameters to be used in the order of their definition.
    Modules are taken to run in the order of the last forward. `reserved_nbytes`: what a caching allocator keeps for
    these allocations alone, by the rules of torch's for CUDA; activations share what is free of that between them.
    None: a tensor subclass gathers itself.
    """

    groups: tuple[GroupReport, ...]
    traffic: Traffic
    peak_nbytes: int | None = None
    peak_nbytes_bound: int | None = None
    reserved_nbytes: int | None = None

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
        if self.peak_nbytes is not None and self.peak_nbytes_bound is not None and self.reserved_nbytes is not None:
            lines.append(
                f"peak: {self.peak_nbytes / 2**20:.3f} MiB of parameters, gradients and buffers in a step, at most "
                f"{self.peak_nbytes_bound / 2**20:.3f} MiB; a caching allocator reserves "
                f"{self.reserved_nbytes / 2**20:.3f} MiB for them"
            )
        moved = self.traffic
        lines.append(
            f"moved: {moved.gathers} gathers, {moved.reduces} reduce-scatters, {moved.all_reduces} all-reduces, "
            f"{moved.wire_bytes / 2**20:.3f} MiB received, {moved.copied_bytes / 2**20:.3f} MiB copied around them"
        )
        return "\n".join(lines)


def report(module: nn.Module) -> ModelReport:
    """Describe a model that `fully_shard` wrapped, or that holds wrapped modules."""
    states = _states(module)
    groups = tuple(_describe(group) for state in states for group in state.groups)
    peak = footprint_of_step(module, states)
    if peak is None:
        return ModelReport(groups, traffic(module))
    return ModelReport(groups, traffic(module), peak.estimate, peak.bound, peak.reserved)


def traffic(module: nn.Module) -> Traffic:
    """What the model moved since it was wrapped; subtract two of these to get a step."""
    counters = {id(group.traffic): group.traffic for state in _states(module) for group in state.groups}
    total = Traffic()
    for counter in counters.values():
        total = total + counter
    return total


def explain(module: nn.Module) -> str:
    """The report as a table: groups, bytes, padding, peak, collectives."""
    return str(report(module))


def _states(module: nn.Module) -> list[ModuleState]:
    states = dict.fromkeys(state for each in module.modules() if (state := find_state(each)) is not None)
    if not states:
        raise VescaleError(f"{type(module).__name__} holds no module that vescale_fsdp.fully_shard wrapped")
    return list(states)


def _describe(group: ParamGroup) -> GroupReport:
    shard = group.shards.buffer
    whole_nbytes = group.mesh.num_ranks * shard.flat.numel() * group.compute_dtype.itemsize
    footprint = footprint_of_group(group)
    peak = None if footprint is None else footprint.peak
    return GroupReport(group.plan, group.shards.nbytes, whole_nbytes, group.reshard_after_forward, peak)
