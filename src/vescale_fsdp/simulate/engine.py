"""What an engine pads, copies and sends for one group: ours from its plan, FSDP2 from its rule of even rows.

GPT-OSS-120B's experts, (128, 5760, 2880), over 256 ranks: ours cuts them anywhere, 16.6 MB of bf16 per rank; FSDP2
gives each of 128 ranks one expert and pads the other 128, 33.2 MB on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..model_plan import PlannedGroup, plan_model
from ..shapes import ModelShapes, ShapeGroup
from .workload import Workload

__all__ = ["FSDP2", "OURS", "Engine", "GroupCost"]

STORED_BYTES = 4
STATE_BYTES = 8
"""AdamW's two moments in float32."""


@dataclass(frozen=True)
class GroupCost:
    """One copy of a group on one rank; elements unless the name says bytes.

    numel: of its parameters; largest: of its largest parameter; whole: gathered, padding included; share: kept per
    rank; state_numel: per rank that optimizer states are kept for. Copied bytes count what is read and what is written.
    """

    name: str
    count: int
    is_root: bool
    numel: int
    largest: int
    whole: int
    share: int
    state_numel: int
    gather_copy_bytes: int
    reduce_copy_bytes: int


@dataclass(frozen=True)
class Engine:
    """A name and the costs of every group of a workload at a number of ranks.

    step_bytes: of temporaries per element of its shard that the optimizer step makes.
    """

    name: str
    costs: Callable[[Workload, int], tuple[GroupCost, ...]]
    step_bytes: int


def _ours(workload: Workload, num_ranks: int) -> tuple[GroupCost, ...]:
    """Gathered in place: one cast of the shard where dtypes differ; each gradient is written once."""
    costs = []
    for planned in _planned(workload.shapes, num_ranks):
        share, whole = planned.plan.share, planned.plan.share * num_ranks
        numel = planned.plan.numel
        cast = share * (STORED_BYTES + workload.compute_bytes) if workload.compute_bytes != STORED_BYTES else 0
        written = numel * (workload.compute_bytes + workload.reduce_bytes)
        costs.append(_cost(planned.shapes, numel, whole, share, share, cast, written))
    return tuple(costs)


@lru_cache(maxsize=64)  # weak and strong scaling ask for the same plans
def _planned(shapes: ModelShapes, num_ranks: int) -> tuple[PlannedGroup, ...]:
    return plan_model(shapes.with_dtype("float32"), num_ranks).groups


def _fsdp2(workload: Workload, num_ranks: int) -> tuple[GroupCost, ...]:
    """Rows are padded to a multiple of the ranks; a gather is copied in and out, a reduction in."""
    costs = []
    for group in workload.shapes.groups:
        rows = [(spec.shape[0] if spec.shape else 1, math.prod(spec.shape[1:])) for spec in group.specs]
        share = sum(-(-count // num_ranks) * rest for count, rest in rows)
        kept = sum(min(-(-count // num_ranks), count) * rest for count, rest in rows)
        whole = share * num_ranks
        width = workload.compute_bytes
        cast = share * (STORED_BYTES + width) if width != STORED_BYTES else 0
        copies = cast + share * 2 * width + whole * 2 * width
        written = group.numel * width + whole * workload.reduce_bytes
        costs.append(_cost(group, group.numel, whole, share, kept, copies, written))
    return tuple(costs)


def _cost(
    group: ShapeGroup, numel: int, whole: int, share: int, state_numel: int, gather: int, reduce: int
) -> GroupCost:
    return GroupCost(
        name=group.name,
        count=group.count,
        is_root=group.count == 1 and not any(part.isdigit() for part in group.prefixes[0].split(".")),
        numel=numel,
        largest=max((math.prod(spec.shape) for spec in group.specs), default=0),
        whole=whole,
        share=share,
        state_numel=state_numel,
        gather_copy_bytes=gather,
        reduce_copy_bytes=reduce,
    )


OURS = Engine("vescale-fsdp", _ours, step_bytes=0)
FSDP2 = Engine("fsdp2", _fsdp2, step_bytes=4)
