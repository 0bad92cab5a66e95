"""A workload at many numbers of ranks: weak scaling, strong scaling, and growing models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ..errors import VescaleError
from ..shapes import ModelShapes, ShapeGroup
from .engine import FSDP2, OURS, Engine
from .machine import Machine
from .memory import Memory, memory_of
from .step import StepTime, time_of
from .workload import Workload

__all__ = ["ENGINES", "Point", "Scaling", "scale"]

VERSION = 1
"""Of the JSON report."""

ENGINES = (OURS, FSDP2)
GROWTH = (1, 2, 4, 8)


@dataclass(frozen=True)
class Point:
    """One engine at one number of ranks; `growth` times the model's layers, `tokens` per rank."""

    engine: str
    num_ranks: int
    tokens: int
    growth: int
    parameters: int
    padding_pct: float
    time: StepTime
    memory: Memory
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.num_ranks * self.tokens / self.time.total


@dataclass(frozen=True)
class Scaling:
    """Weak: the same tokens per rank. Strong: the same tokens in all. Model: more layers over the most ranks."""

    model: str
    machine: Machine
    weak: tuple[Point, ...]
    strong: tuple[Point, ...]
    model_sizes: tuple[Point, ...]

    def to_json(self) -> str:
        value = {
            "version": VERSION,
            "model": self.model,
            "machine": asdict(self.machine),
            **{kind: [_value(point) for point in getattr(self, kind)] for kind in ("weak", "strong", "model_sizes")},
        }
        return json.dumps(value, indent=1) + "\n"


def scale(
    workload: Workload, machine: Machine, ranks: Sequence[int], *, engines: Sequence[Engine] = ENGINES
) -> Scaling:
    """Simulate a step of each engine at every number of ranks."""
    if not ranks or min(ranks) < 1:
        raise VescaleError(f"ranks: expected numbers >= 1, got {list(ranks)}")
    ranks = sorted(set(ranks))
    total = workload.tokens * ranks[0]
    strong = [(count, replace(workload, tokens=total // count)) for count in ranks if total >= count]
    grown = [replace(workload, shapes=_grown(workload.shapes, growth)) for growth in GROWTH]
    return Scaling(
        workload.shapes.model,
        machine,
        tuple(_points(engines, machine, [(count, workload, 1) for count in ranks])),
        tuple(_points(engines, machine, [(count, less, 1) for count, less in strong])),
        tuple(_points(engines, machine, [(ranks[-1], w, g) for w, g in zip(grown, GROWTH, strict=True)])),
    )


def _points(engines: Sequence[Engine], machine: Machine, cases: Sequence[tuple[int, Workload, int]]) -> Iterator[Point]:
    for engine in engines:
        for num_ranks, workload, growth in cases:
            costs = engine.costs(workload, num_ranks)
            memory = memory_of(engine, workload, costs)
            gathered = sum(cost.whole * cost.count for cost in costs)
            yield Point(
                engine.name,
                num_ranks,
                workload.tokens,
                growth,
                workload.shapes.numel,
                100 * (gathered - workload.shapes.numel) / workload.shapes.numel,
                time_of(engine, workload, machine, costs, num_ranks),
                memory,
                memory.fits(machine),
            )


def _grown(shapes: ModelShapes, growth: int) -> ModelShapes:
    """The model with so many times its repeated groups."""
    return shapes.with_groups(_repeated(group, growth) for group in shapes.groups)


def _repeated(group: ShapeGroup, growth: int) -> ShapeGroup:
    if group.count == 1 or growth == 1:
        return group
    more = tuple(f"{prefix}+{copy}" for copy in range(1, growth) for prefix in group.prefixes)
    return replace(group, prefixes=group.prefixes + more)


def _value(point: Point) -> dict[str, object]:
    return {
        **asdict(point),
        "step_s": point.time.total,
        "mfu": point.time.mfu,
        "peak_bytes": point.memory.peak,
        "tokens_per_s": point.tokens_per_s,
    }
