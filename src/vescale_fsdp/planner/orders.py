"""Orders to try: the module's own first, so that ties keep it, then by granularity and size."""

from __future__ import annotations

from collections.abc import Iterator

from .classes import ShareClass
from .problem import Order, Problem

__all__ = ["sorted_orders"]


def sorted_orders(problem: Problem, share_class: ShareClass) -> Iterator[Order]:
    """Module order; coarse blocks first; large tensors first; first the tensors that may not span ranks."""
    kinds = problem.kinds
    yield problem.module_order
    indices = range(len(kinds))
    coarse_first = sorted(indices, key=lambda i: (-kinds[i].granularity, -kinds[i].numel))
    large_first = sorted(indices, key=lambda i: (-kinds[i].numel, -kinds[i].granularity))
    rigid_first = sorted(coarse_first, key=lambda i: share_class.spans_ranks[i])
    for order in (coarse_first, large_first, rigid_first):
        yield tuple((i, kinds[i].count) for i in order)
