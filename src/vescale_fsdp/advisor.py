"""How many ranks should share the parameters: padding, memory and traffic for every HSDP split of the ranks.

`num_ranks = shard_size * replicas`: a model is sharded over `shard_size` ranks, and `replicas` such sets average their
gradients. A larger shard group needs less memory, moves more bytes in gathers, and pads more, in steps; the knee is the
largest shard group whose padding is still at most `max_padding_pct`.

    8 ranks, one (16, 4) bfloat16 parameter:  shard_size 4, replicas 2
      16 elements a rank: 32 bytes; a gather brings 3 x 32 = 96 bytes; the ring all-reduce sends 2 * 1/2 * 32 = 32 bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from .errors import VescaleError
from .model_plan import ModelPlan, plan_model
from .shapes import ModelShapes, ShapeGroup

__all__ = ["MERGES", "Advice", "Merge", "Split", "advise"]

VERSION = 1
"""Of the JSON report."""

MERGES = (1, 2, 4, 8)
"""Layers per group that are tried."""

MAX_PADDING_PCT = 3.0
STATE_BYTES = 12
"""Per element: fp32 master weights and AdamW's two fp32 moments."""


@dataclass(frozen=True)
class Split:
    """One way to split the ranks; bytes are one rank's, padding included.

    `all_gather_bytes` are received when every group is gathered once (a step does so in forward and, if parameters are
    resharded, again in backward); `all_reduce_bytes` are sent by a ring all-reduce of the gradients over the replicas,
    in the parameters' dtype.
    """

    shard_size: int
    replicas: int
    lanes: int
    padding_pct: float
    bound_pct: float
    parameter_bytes: int
    state_bytes: int
    all_gather_bytes: int
    all_reduce_bytes: int


@dataclass(frozen=True)
class Merge:
    """What groups of `layers` consecutive layers would give; `gathered_bytes` is the largest group, gathered."""

    shard_size: int
    layers: int
    padding_pct: float
    gathered_bytes: int


@dataclass(frozen=True)
class Advice:
    """A sweep over all shard-group sizes, smallest first."""

    model: str
    source: str
    num_ranks: int
    max_padding_pct: float
    splits: tuple[Split, ...]
    merges: tuple[Merge, ...]

    @property
    def knee(self) -> Split:
        """The largest shard group within `max_padding_pct`; where none is, the one that pads least."""
        within = [split for split in self.splits if split.padding_pct <= self.max_padding_pct]
        return within[-1] if within else min(self.splits, key=lambda split: split.padding_pct)

    def to_json(self) -> str:
        value = {"version": VERSION, **asdict(self), "knee": self.knee.shard_size}
        return json.dumps(value, indent=1) + "\n"


def advise(
    shapes: ModelShapes,
    num_ranks: int,
    *,
    max_lanes: int | None = None,
    max_padding_pct: float = MAX_PADDING_PCT,
    bytes_of_state: int = STATE_BYTES,
) -> Advice:
    """Plan the model at every divisor of `num_ranks`, and merged layers at the knee, behind it and at the largest."""
    if num_ranks < 1:
        raise VescaleError(f"num_ranks is >= 1, got {num_ranks}")
    splits = tuple(
        _split(plan_model(shapes, size, max_lanes=max_lanes), num_ranks // size, bytes_of_state)
        for size in _divisors(num_ranks)
    )
    advice = Advice(shapes.model, shapes.source, num_ranks, max_padding_pct, splits, ())
    sizes = [split.shard_size for split in splits]
    knee = sizes.index(advice.knee.shard_size)
    looked_at = dict.fromkeys((sizes[knee], sizes[min(knee + 1, len(sizes) - 1)], sizes[-1]))
    merges = tuple(_merges(shapes, tuple(looked_at), max_lanes))
    return Advice(shapes.model, shapes.source, num_ranks, max_padding_pct, splits, merges)


def merge_layers(shapes: ModelShapes, layers: int) -> ModelShapes:
    """The model with `layers` consecutive numbered blocks per group; what is in no block stays as it is."""
    blocks: dict[str, list[tuple[int, ShapeGroup]]] = {}
    groups: list[ShapeGroup] = []
    for group in shapes.groups:
        for copy in group.copies():
            container, _, number = copy.prefixes[0].rpartition(".")
            if container and number.isdigit():
                blocks.setdefault(f"{container} {copy.specs[0].dtype}", []).append((int(number), copy))
            else:
                groups.append(copy)
    for members in blocks.values():
        ordered = [copy for _, copy in sorted(members, key=lambda member: member[0])]
        groups += [_merged(ordered[at : at + layers]) for at in range(0, len(ordered), layers)]
    return shapes.with_groups(groups)


def _merged(copies: Sequence[ShapeGroup]) -> ShapeGroup:
    name = copies[0].prefixes[0] if len(copies) == 1 else f"{copies[0].prefixes[0]}..{copies[-1].prefixes[0]}"
    bits = {bits for copy in copies for bits in copy.code_bits}
    return ShapeGroup((name,), tuple(spec for copy in copies for spec in copy.specs), tuple(sorted(bits)))


def _split(plan: ModelPlan, replicas: int, bytes_of_state: int) -> Split:
    return Split(
        shard_size=plan.num_ranks,
        replicas=replicas,
        lanes=max(len(group.plan.lanes) for group in plan.groups),
        padding_pct=plan.padding_pct,
        bound_pct=plan.bound_pct,
        parameter_bytes=plan.nbytes,
        state_bytes=plan.share * bytes_of_state,
        all_gather_bytes=plan.nbytes * (plan.num_ranks - 1),
        all_reduce_bytes=2 * (replicas - 1) * plan.nbytes // replicas,
    )


def _merges(shapes: ModelShapes, sizes: Sequence[int], max_lanes: int | None) -> Iterator[Merge]:
    merged = {layers: merge_layers(shapes, layers) for layers in MERGES}
    for size in sizes:
        for layers, model in merged.items():
            plan = plan_model(model, size, max_lanes=max_lanes)
            gathered = max(group.plan.nbytes * size for group in plan.groups)
            yield Merge(size, layers, plan.padding_pct, gathered)


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]
