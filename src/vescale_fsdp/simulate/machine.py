"""The rates of a cluster: arithmetic, memory, and the alpha-beta model of its links."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import VescaleError

__all__ = ["MACHINES", "Link", "Machine", "Moves", "read_machine"]

VERSION = 1
"""Of the JSON format."""


@dataclass(frozen=True)
class Link:
    """What carries a collective over up to `ranks` ranks; bandwidths are of the bus, in bytes per second and rank.

    A collective over W ranks with n bytes of whole tensor takes `latency * log2(W) + (W - 1) / W * n / bandwidth`.
    reduce_latency_s: of reductions, if that is not the gathers': gloo reduces to all ranks, in two rounds.
    """

    ranks: int
    latency_s: float
    gather_bandwidth: float
    reduce_bandwidth: float
    reduce_latency_s: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "ranks", "gather_bandwidth", "reduce_bandwidth")
        for name in ("latency_s", "reduce_latency_s"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise VescaleError(f"link: {name} is a time >= 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Moves:
    """What is copied within a rank's memory, and what is cast on the way: bytes read and bytes written together."""

    copied: int = 0
    cast: int = 0

    @classmethod
    def between(cls, numel: int, source: int, written: int, target: int) -> Moves:
        """`numel` elements of `source` bytes each are read, `written` of `target` bytes are written."""
        nbytes = numel * source + written * target
        return cls(copied=nbytes) if source == target else cls(cast=nbytes)

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.copied + other.copied, self.cast + other.cast)


@dataclass(frozen=True)
class Machine:
    """A cluster of equal ranks. Rates are reached ones, except `peak_flops`, to which MFU refers.

    copy_bandwidth: bytes read and written per second by copies; cast_bandwidth: by casts, where that is another.
    updates_per_s: elements of float32 per second that the optimizer steps; tiled_updates_per_s: where all passes of an
    update go over what a cache holds, if that is another.
    overlaps: whether collectives run beside computation (CUDA streams) or in between (gloo).
    reserved_bytes: memory of a rank that tensors cannot have (context, communicators, fragments).
    """

    name: str
    peak_flops: float
    flops: float
    copy_bandwidth: float
    updates_per_s: float
    memory_bytes: int
    links: tuple[Link, ...]
    reserved_bytes: int = 0
    overlaps: bool = True
    cast_bandwidth: float | None = None
    tiled_updates_per_s: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "peak_flops", "flops", "copy_bandwidth", "updates_per_s", "memory_bytes")
        if not self.links:
            raise VescaleError(f"{self.name}: expected at least one link, got none")
        _positive(
            self, *(name for name in ("cast_bandwidth", "tiled_updates_per_s") if getattr(self, name) is not None)
        )
        if self.flops > self.peak_flops:
            raise VescaleError(f"{self.name}: flops {self.flops:g} exceed peak_flops {self.peak_flops:g}")

    def gather_s(self, nbytes: float, num_ranks: int) -> float:
        """All-gather of `nbytes` in all."""
        link = self._link(num_ranks)
        return _collective(nbytes, num_ranks, link.latency_s, link.gather_bandwidth)

    def reduce_s(self, nbytes: float, num_ranks: int) -> float:
        """Reduce-scatter of `nbytes` in all."""
        link = self._link(num_ranks)
        latency_s = link.latency_s if link.reduce_latency_s is None else link.reduce_latency_s
        return _collective(nbytes, num_ranks, latency_s, link.reduce_bandwidth)

    def move_s(self, moves: Moves) -> float:
        """Copies and casts within a rank."""
        return moves.copied / self.copy_bandwidth + moves.cast / (self.cast_bandwidth or self.copy_bandwidth)

    def update_s(self, numel: int, *, in_tiles: bool) -> float:
        """One step of the optimizer."""
        return numel / ((in_tiles and self.tiled_updates_per_s) or self.updates_per_s)

    def _link(self, num_ranks: int) -> Link:
        """The smallest that spans the ranks; beyond the largest, the largest."""
        ordered = sorted(self.links, key=lambda link: link.ranks)
        return next((link for link in ordered if link.ranks >= num_ranks), ordered[-1])

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"


def _collective(nbytes: float, num_ranks: int, latency_s: float, bandwidth: float) -> float:
    if num_ranks == 1:
        return 0.0
    return latency_s * math.log2(num_ranks) + (num_ranks - 1) / num_ranks * nbytes / bandwidth


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 < value < math.inf:
            raise VescaleError(f"{type(owner).__name__.lower()}: {name} is a number > 0, got {value}")


H800 = Machine(
    name="h800",
    peak_flops=989e12,
    flops=0.55 * 989e12,
    copy_bandwidth=2.5e12,
    updates_per_s=3.35e12 * 0.8 / 28,
    memory_bytes=80 * 10**9,
    links=(Link(8, 8e-6, 160e9, 160e9), Link(1 << 20, 20e-6, 148e9, 137e9)),
    reserved_bytes=6 * 10**9,
)
"""A GPU of 80 GB on rails of InfiniBand. Link and copy rates are those at which one layer of GPT-OSS-120B takes what
Table 1 of arXiv 2602.22437 reports on 64 GPUs: 6.5 GB gathered in 43.7 ms and copied out in 5.2 ms, 13 GB reduced in
94.2 ms. The optimizer moves 28 bytes per element (fp32 parameter, gradient, two moments) at 80 % of 3.35 TB/s."""

MACHINES = {H800.name: H800}


def read_machine(source: str) -> Machine:
    """A machine by name, or from a JSON file as `Machine.to_json` and benchmarks/step.py write it."""
    if source in MACHINES:
        return MACHINES[source]
    path = Path(source)
    if not path.exists():
        raise VescaleError(f"{source}: no such machine or file. Machines: {', '.join(MACHINES)}")
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise VescaleError(f"{source}: a machine is JSON: {error}") from None
    if not isinstance(value, dict) or value.pop("version", None) != VERSION:
        raise VescaleError(f"{source}: expected a machine of version {VERSION}")
    links = value.get("links")
    if not isinstance(links, list):
        raise VescaleError(f"{source}: links: expected a list, got {type(links).__name__}")
    made = tuple(_made(Link, link, f"{source}: links[{i}]") for i, link in enumerate(links))
    machine: Machine = _made(Machine, {**value, "links": made}, source)
    return machine


def _made(kind: Any, value: Any, where: str) -> Any:  # a dataclass and the value it is made from
    known = {field.name: field.type for field in fields(kind)}
    if not isinstance(value, dict):
        raise VescaleError(f"{where}: expected an object, got {type(value).__name__}")
    if unknown := sorted(set(value) - set(known)):
        raise VescaleError(f"{where}: unknown entry {unknown[0]!r}. Known: {', '.join(known)}")
    for name, entry in value.items():
        if entry is None and "None" in str(known[name]):
            continue
        is_number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
        if str(known[name]).split(" ")[0] in ("int", "float") and not is_number:
            raise VescaleError(f"{where}: {name} is a number, got {entry!r}")
    try:
        return kind(**value)
    except TypeError as error:
        raise VescaleError(f"{where}: {str(error).partition(') ')[2] or error}") from None
