"""When everything of a step happens: computation and copies on one queue, collectives on another.

    compute  | F0 | F1 | F2 |   B2   |   B1   |   B0   | optimizer
    wire     |G0|G1|G2|         |G1 |R2   |G0 |R1   |R0   |

A gather starts when the group before it begins to compute (one ahead), a reduction when its group's backward has ended.
What the compute queue waits for is exposed. Without overlap everything stands in one queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .engine import Engine, GroupCost
from .machine import Machine
from .workload import Workload

__all__ = ["StepTime", "time_of"]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a rank; the parts add up to `total`."""

    compute: float
    exposed_gather: float
    exposed_reduce: float
    copies: float
    optimizer: float
    flops: float
    peak_flops: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed_gather + self.exposed_reduce + self.copies + self.optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs of the step over what the machine could do at its peak."""
        return self.flops / self.total / self.peak_flops


@dataclass
class _Queues:
    """The clocks of both queues, and what the compute queue waited for."""

    overlaps: bool
    compute: float = 0.0
    wire: float = 0.0
    busy: float = 0.0
    copies: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)

    def send(self, seconds: float, not_before: float) -> float:
        """Put a collective on the wire; when it is done."""
        if not self.overlaps:
            self.compute += seconds
            self.wire = self.compute
        else:
            self.wire = max(self.wire, not_before) + seconds
        return self.wire

    def work(self, seconds: float, copies: float) -> None:
        self.compute += seconds + copies
        self.busy += seconds
        self.copies += copies


def time_of(
    engine: Engine,
    workload: Workload,
    machine: Machine,
    costs: Sequence[GroupCost],
    num_ranks: int,
    *,
    compute_s: float | None = None,
) -> StepTime:
    """Walk through a step. `compute_s`: a measured time of forward and backward, instead of one from FLOPs."""
    order = [cost for cost in costs if cost.is_root] + [
        cost for cost in costs for _ in range(cost.count) if not cost.is_root
    ]
    forward = _forward_seconds(workload, machine, order, compute_s)
    gathers = [machine.gather_s(cost.whole * workload.compute_bytes, num_ranks) for cost in order]
    reduces = [machine.reduce_s(cost.whole * workload.reduce_bytes, num_ranks) for cost in order]
    queues = _Queues(machine.overlaps)
    _run_forward(queues, machine, order, forward, gathers)
    _run_backward(queues, machine, order, forward, (gathers, reduces), again=workload.checkpointed)
    share = sum(cost.share * cost.count for cost in costs)
    optimizer = machine.update_s(share, in_tiles=engine.steps_in_tiles)
    return StepTime(
        queues.busy, queues.gather, queues.reduce, queues.copies, optimizer, workload.model_flops, machine.peak_flops
    )


def _forward_seconds(
    workload: Workload, machine: Machine, order: Sequence[GroupCost], compute_s: float | None
) -> list[float]:
    flops = {group.name: workload.forward_flops(group) for group in workload.shapes.groups}
    each = [flops[cost.name] for cost in order]
    passes = 4 if workload.checkpointed else 3
    if compute_s is None:
        return [value / machine.flops for value in each]
    total = sum(each)
    return [compute_s / passes * (value / total if total else 1 / len(each)) for value in each]


def _run_forward(
    queues: _Queues, machine: Machine, order: Sequence[GroupCost], seconds: Sequence[float], gathers: Sequence[float]
) -> None:
    """Every group in order, each gathered while the one before it computes."""
    done = _gather(queues, gathers[0], 0.0)
    for i, cost in enumerate(order):
        queues.gather += max(done - queues.compute, 0.0)
        queues.compute = max(queues.compute, done)
        if i + 1 < len(order):
            done = _gather(queues, gathers[i + 1], queues.compute)
        queues.work(seconds[i], machine.move_s(cost.gather_moves))


def _gather(queues: _Queues, seconds: float, not_before: float) -> float:
    if not queues.overlaps:
        queues.gather += seconds
    return queues.send(seconds, not_before)


def _run_backward(
    queues: _Queues,
    machine: Machine,
    order: Sequence[GroupCost],
    seconds: Sequence[float],
    wires: tuple[Sequence[float], Sequence[float]],
    *,
    again: bool,
) -> None:
    """Layers from the last to the first, then the root, which is gathered still; reductions follow their group."""
    gathers, reduces = wires
    layers = [i for i in reversed(range(len(order))) if not order[i].is_root]
    roots = [i for i in reversed(range(len(order))) if order[i].is_root]
    done = _gather(queues, gathers[layers[0]], queues.compute) if layers else queues.compute
    for at, i in enumerate([*layers, *roots]):
        copies = machine.move_s(order[i].reduce_moves)
        if at < len(layers):
            queues.gather += max(done - queues.compute, 0.0)
            queues.compute = max(queues.compute, done)
            copies += machine.move_s(order[i].gather_moves)
            if at + 1 < len(layers):
                done = _gather(queues, gathers[layers[at + 1]], queues.compute)
        queues.work(seconds[i] * (3 if again and not order[i].is_root else 2), copies)
        if not queues.overlaps:
            queues.reduce += reduces[i]
        queues.send(reduces[i], queues.compute)
    queues.reduce += max(queues.wire - queues.compute, 0.0)
    queues.compute = max(queues.compute, queues.wire)
