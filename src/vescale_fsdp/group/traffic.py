"""What a model moved between ranks: counters that its groups write and reports read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """Collectives and bytes since the counters were made; subtract two snapshots to get a step.

    `gathered_bytes` and `reduced_bytes` are the sizes of whole buffers, padding included. `wire_bytes` is what this
    rank receives in a ring: (ranks - 1) shares for a gather or a reduce-scatter, 2 (replicas - 1) / replicas of a share
    for an all-reduce.
    """

    gathers: int = 0
    reduces: int = 0
    all_reduces: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    wire_bytes: int = 0
    copied_bytes: int = 0
    """Bytes that the runtime wrote around collectives: casts before a gather, gradients into the reduce input."""

    @property
    def collectives(self) -> int:
        return self.gathers + self.reduces + self.all_reduces

    def snapshot(self) -> Traffic:
        return replace(self)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)))
