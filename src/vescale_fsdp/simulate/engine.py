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
from .machine import Moves
from .workload import Workload

__all__ = ["FSDP2", "OURS", "Engine", "GroupCost"]

STORED_BYTES = 4
STATE_BYTES = 8
"""AdamW's two moments in float32."""


@dataclass(frozen=True)
class GroupCost:
    """One copy of a group on one rank; elements unless the name says bytes.

    numel: of its parameters; largest: of its largest parameter; whole: gathered, padding included; share: kept per
    rank; state_numel: per rank that optimizer states are kept for.
    """

    name: str
    count: int
    is_root: bool
    numel: int
    largest: int
    whole: int
    share: int
    state_numel: int
    gather_moves: Moves
    reduce_moves: Moves


@dataclass(frozen=True)
class Engine:
    """A name and the costs of every group of a workload at a number of ranks.

    step_bytes: of temporaries per element of its shard that the optimizer step makes; steps_in_tiles: whether all
    passes of an update go over a few elements before the next few, or each pass over all of them.
    """

    name: str
    costs: Callable[[Workload, int], tuple[GroupCost, ...]]
    step_bytes: int
    steps_in_tiles: bool


def _ours(workload: Workload, num_ranks: int) -> tuple[GroupCost, ...]:
    """Gathered in place: one cast of the shard where dtypes differ; each gradient is written once."""
    costs = []
    for planned in _planned(workload.shapes, num_ranks):
        share, numel = planned.plan.share, planned.plan.numel
        gather = _cast(share, STORED_BYTES, workload.compute_bytes)
        written = Moves.between(numel, workload.compute_bytes, numel, workload.reduce_bytes)
        stored = _cast(share, workload.reduce_bytes, STORED_BYTES)
        costs.append(_cost(planned.shapes, numel, share * num_ranks, share, share, gather, written + stored))
    return tuple(costs)


def _cast(numel: int, source: int, target: int) -> Moves:
    """Nothing where the dtypes are one."""
    return Moves() if source == target else Moves.between(numel, source, numel, target)


@lru_cache(maxsize=64)  # weak and strong scaling ask for the same plans
def _planned(shapes: ModelShapes, num_ranks: int) -> tuple[PlannedGroup, ...]:
    return plan_model(shapes.with_dtype("float32"), num_ranks).groups


def _fsdp2(workload: Workload, num_ranks: int) -> tuple[GroupCost, ...]:
    """Rows are padded to a multiple of the ranks; a gather is copied in and out, a reduction in."""
    costs = []
    width = workload.compute_bytes
    for group in workload.shapes.groups:
        rows = [(spec.shape[0] if spec.shape else 1, math.prod(spec.shape[1:])) for spec in group.specs]
        share = sum(-(-count // num_ranks) * rest for count, rest in rows)
        kept = sum(min(-(-count // num_ranks), count) * rest for count, rest in rows)
        whole = share * num_ranks
        copies = Moves.between(share, width, share, width) + Moves.between(whole, width, whole, width)
        written = Moves.between(group.numel, width, whole, workload.reduce_bytes)
        stored = _cast(share, workload.reduce_bytes, STORED_BYTES)
        gather = _cast(share, STORED_BYTES, width) + copies
        costs.append(_cost(group, group.numel, whole, share, kept, gather, written + stored))
    return tuple(costs)


def _cost(
    group: ShapeGroup, numel: int, whole: int, share: int, state_numel: int, gather: Moves, reduce: Moves
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
        gather_moves=gather,
        reduce_moves=reduce,
    )


OURS = Engine("vescale-fsdp", _ours, step_bytes=0, steps_in_tiles=True)
FSDP2 = Engine("fsdp2", _fsdp2, step_bytes=4, steps_in_tiles=False)
