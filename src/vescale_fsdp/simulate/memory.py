"""Bytes that a rank holds: at rest, and at the fullest moment of a step.

The fullest moment is, for both engines, the end of the backward of a layer in the middle, or the optimizer's step:

    at rest     parameters and moments                      (4 + 8) bytes per element of the shard
    gradients   of what has been reduced                    4
    root        gathered since forward, and its head's gradient
    layers      two gathered (one in use, the next under way), one's gradients, the input of one's reduction
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .engine import STATE_BYTES, STORED_BYTES, Engine, GroupCost
from .machine import Machine
from .workload import Workload

__all__ = ["Memory", "memory_of"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; `peak` holds activations too."""

    at_rest: int
    gradients: int
    in_backward: int
    in_step: int
    activations: int

    @property
    def peak(self) -> int:
        return self.at_rest + self.gradients + max(self.in_backward + self.activations, self.in_step)

    def fits(self, machine: Machine) -> bool:
        return self.peak <= machine.memory_bytes - machine.reserved_bytes


def memory_of(engine: Engine, workload: Workload, costs: Sequence[GroupCost]) -> Memory:
    """From the costs of the engine's groups."""
    share = sum(cost.share * cost.count for cost in costs)
    state = sum(cost.state_numel * cost.count for cost in costs)
    at_rest = share * STORED_BYTES + state * STATE_BYTES
    roots = [cost for cost in costs if cost.is_root]
    layers = [cost for cost in costs if not cost.is_root] or roots
    largest = max(layers, key=lambda cost: cost.whole)
    width, num_layers = workload.compute_bytes, sum(cost.count for cost in layers)
    gathered = min(2, num_layers) * largest.whole * width
    reduced = largest.whole * workload.reduce_bytes if num_layers > 1 else 0
    missing = sum(root.share for root in roots if layers is not roots) + min(2, num_layers) * largest.share
    held = gathered + reduced + largest.numel * width - missing * STORED_BYTES
    if layers is not roots:
        held += sum(root.whole for root in roots) * width + max((root.largest for root in roots), default=0) * width
    return Memory(at_rest, share * STORED_BYTES, max(held, 0), share * engine.step_bytes, workload.activation_bytes)
