"""How many relative units each rank owns: a run-length sequence that costs the same at 8 and at 16,384 ranks."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from ragged_dtensor.errors import LayoutError

Runs = tuple[tuple[int, int], ...]


class Units(Sequence[int]):
    """Non-negative integers, one per rank, reduced by their gcd and stored as runs of (value, count).

    `Units((2, 4, 4, 0))` equals `(1, 2, 2, 0)` and keeps `((1, 1), (2, 2), (0, 1))`. A cut of a flat buffer into equal
    shares has at most five runs (zeros, first piece, equal pieces, last piece, zeros), however many ranks there are.
    """

    __slots__ = ("_ends", "_hash", "_len", "_runs", "_total")

    def __init__(self, values: Iterable[int] = (), *, runs: Iterable[tuple[int, int]] | None = None) -> None:
        if runs is None:
            runs = values.runs if isinstance(values, Units) else _runs_of(values)
        self._runs = _canonical_runs(runs)
        self._len = sum(count for _, count in self._runs)
        self._total = sum(value * count for value, count in self._runs)
        self._hash: int | None = None

    @classmethod
    def from_runs(cls, runs: Iterable[tuple[int, int]]) -> Units:
        """Units from (value, count) pairs, in O(runs)."""
        return cls(runs=runs)

    @classmethod
    def one_owner(cls, rank: int, num_ranks: int) -> Units:
        """All units on `rank`."""
        return cls(runs=((0, rank), (1, 1), (0, num_ranks - rank - 1)))

    @property
    def runs(self) -> Runs:
        return self._runs

    @property
    def total(self) -> int:
        return self._total

    def before(self, rank: int) -> int:
        """Sum of the units of all ranks below `rank`."""
        total = 0
        for value, count in self._runs:
            if rank <= count:
                return total + value * rank
            total += value * count
            rank -= count
        return total

    @property
    def are_equal(self) -> bool:
        """Whether every rank owns the same."""
        return len(self._runs) == 1

    @property
    def max(self) -> int:
        return max(value for value, _ in self._runs)

    @property
    def owner(self) -> int | None:
        """The only rank that owns anything, or None if there are several."""
        owners = self.owners
        return owners[0] if len(owners) == 1 else None

    @property
    def owners(self) -> range | tuple[int, ...]:
        """The ranks that own anything."""
        found: list[range] = []
        rank = 0
        for value, count in self._runs:
            if value:
                found.append(range(rank, rank + count))
            rank += count
        return found[0] if len(found) == 1 else tuple(itertools.chain(*found))

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        rank = index + self._len if index < 0 else index
        if not 0 <= rank < self._len:
            raise IndexError(f"rank {index} of {self._len}")
        for value, count in self._runs:
            if rank < count:
                return value
            rank -= count
        raise AssertionError("runs are shorter than their length")

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(value, count) for value, count in self._runs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Units):
            return self._runs == other._runs
        if isinstance(other, tuple):
            return self._len == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        # Equal to a tuple means hashing like one; the O(ranks) sum is done once per distinct sequence.
        if self._hash is None:
            self._hash = _hash_as_tuple(self._runs)
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return units_from_runs, (self._runs,)

    def __repr__(self) -> str:
        return f"Units({self.spell()})" if self._is_short else f"Units.from_runs({self._runs})"

    def spell(self) -> str:
        """A spelling that a constructor of placements takes back: the plain tuple while that is short."""
        return str(tuple(self)) if self._is_short else repr(self)

    @property
    def _is_short(self) -> bool:
        return self._len <= 16


def _runs_of(values: Iterable[int]) -> Runs:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise LayoutError(f"local_units must be a sequence of integers, one per rank, got {values!r}.")
    return tuple((value, sum(1 for _ in group)) for value, group in itertools.groupby(values))


def _canonical_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Whole, non-negative values with neighbours merged and divided by their gcd."""
    merged: list[tuple[int, int]] = []
    for value, count in runs:
        value, count = _whole(value), _whole(count)
        if not count:
            continue
        if merged and merged[-1][0] == value:
            count += merged.pop()[1]
        merged.append((value, count))
    divisor = math.gcd(*(value for value, _ in merged))
    if divisor == 0:
        raise LayoutError(f"local_units need at least one rank with a positive share, got runs {tuple(merged)}.")
    return tuple((value // divisor, count) for value, count in merged)


def _whole(value: object) -> int:
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"local_units must be integers, got {value!r} of {type(value).__name__}.") from None
    if isinstance(value, bool) or whole < 0:
        raise LayoutError(f"local_units must be non-negative integers, got {value!r}.")
    return whole


def units_from_runs(runs: Runs) -> Units:
    """What a pickle calls: a plain function of plain tuples."""
    return Units.from_runs(runs)


@functools.lru_cache(maxsize=4096)
def _hash_as_tuple(runs: Runs) -> int:
    return hash(tuple(itertools.chain.from_iterable(itertools.repeat(value, count) for value, count in runs)))
