"""Orders to try: by granularity and by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .problem import Order, Problem

__all__ = ["moved_orders", "sorted_orders"]


def sorted_orders(problem: Problem, spans_ranks: Sequence[bool]) -> Iterator[Order]:
    """Coarse blocks first; large tensors first; first the tensors that may not span ranks."""
    kinds = problem.kinds
    indices = range(len(kinds))
    coarse_first = sorted(indices, key=lambda i: (-kinds[i].granularity, -kinds[i].numel))
    yield tuple([(i, kinds[i].count) for i in coarse_first])
    large_first = sorted(indices, key=lambda i: (-kinds[i].numel, -kinds[i].granularity))
    yield tuple([(i, kinds[i].count) for i in large_first])
    rigid_first = sorted(coarse_first, key=lambda i: spans_ranks[i])
    yield tuple([(i, kinds[i].count) for i in rigid_first])


def moved_orders(order: Order) -> Iterator[Order]:
    """The order with one run at another place: a few small tensors between two families may save a block."""
    for source, run in enumerate(order):
        rest = order[:source] + order[source + 1 :]
        for target in range(len(order)):
            if target != source:
                yield (*rest[:target], run, *rest[target:])
