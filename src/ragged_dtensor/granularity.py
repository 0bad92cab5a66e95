"""What may not be cut: a run of elements, and who asked for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ELEMENT", "Granularity"]


@dataclass(frozen=True, slots=True)
class Granularity:
    """A tensor, flattened, may only be cut at multiples of `numel` elements; `reasons` says who asked.

    Two wishes combine by least common multiple and keep both reasons:

        Granularity(4, ("rows (user)",)) & Granularity(6, ("blocks (fp8)",))  ->  12, both reasons
    """

    numel: int
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(
                f"granularity counts the elements of a run that stays whole: expected >= 1, got {self.numel}"
            )

    def __and__(self, other: Granularity) -> Granularity:
        reasons = self.reasons + tuple(reason for reason in other.reasons if reason not in self.reasons)
        return Granularity(math.lcm(self.numel, other.numel), reasons)


ELEMENT = Granularity(1)
