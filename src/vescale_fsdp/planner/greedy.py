"""Placing tensors in a given order, each at its earliest legal start: no other placement of that order ends earlier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .problem import Kind, Order

__all__ = ["NOWHERE", "end_of", "end_of_run", "runs_of", "start_behind", "start_of_cut"]

NOWHERE = 1 << 200
"""The end of a placement that does not exist: behind every buffer."""


def end_of(order: Order, kinds: Sequence[Kind], spans_ranks: Sequence[bool], share: int, limit: int) -> int:
    """Where the order ends with this share; anything beyond `limit` when it does not fit.

    `spans_ranks[k]`: tensors of kind k may be cut at several rank boundaries; their granularity divides the share.
    """
    position, left = 0, sum([kinds[index].numel * count for index, count in order])
    for index, count in order:
        kind = kinds[index]
        left -= kind.numel * count
        position = end_of_run(position, kind, count, spans_ranks[index], share, limit - left)
        if position == NOWHERE:
            return NOWHERE
    return position


def end_of_run(position: int, kind: Kind, count: int, spans_ranks: bool, share: int, limit: int) -> int:
    """Where `count` equal tensors end that are placed one after the other from `position` on; NOWHERE beyond `limit`.

    A tensor that fits into the rest of this rank's share starts at once. Else it is cut at the boundary after as many
    whole blocks as fit, if what is left fits into the next share or the tensor may span ranks; else it starts there.
    """
    numel, granularity = kind.numel, kind.granularity
    while position + count * numel <= limit:
        rest = share - position % share
        fitting = rest // numel
        if fitting >= count:
            return position + count * numel
        if spans_ranks and numel % granularity == 0 and position % granularity == 0:
            return position + count * numel  # every start is a multiple of the block, and so is every boundary
        position += fitting * numel
        rest -= fitting * numel
        count -= fitting
        if not rest:
            continue
        head = rest - rest % granularity
        if spans_ranks or (head and numel - head <= share):  # most cuts, without a call
            position += rest - head + numel
        else:
            start = start_of_cut(position, rest, numel, granularity, spans_ranks, share)
            if start < 0:
                return NOWHERE
            position = start + numel
        count -= 1
        if not count:
            return position if position <= limit else NOWHERE
    return NOWHERE


def runs_of(
    order: Order, kinds: Sequence[Kind], spans_ranks: Sequence[bool], share: int
) -> Iterator[tuple[int, int, int]]:
    """(kind, start, count) of tensors that follow each other without a gap; the order must fit."""
    position = 0
    for index, count in order:
        numel, granularity = kinds[index].numel, kinds[index].granularity
        while count:
            rest = share - position % share
            fitting = rest // numel
            if spans_ranks[index] and numel % granularity == 0 and position % granularity == 0:
                fitting = count  # every start is a multiple of the block, and so is every boundary
            elif not fitting:
                position = start_of_cut(position, rest, numel, granularity, spans_ranks[index], share)
                assert position >= 0, "the order was found to fit before it was placed"
                fitting = 1
            fitting = min(count, fitting)
            yield index, position, fitting
            position += fitting * numel
            count -= fitting


def start_of_cut(position: int, rest: int, numel: int, granularity: int, spans_ranks: bool, share: int) -> int:
    """Start of a tensor that does not fit into the `rest` of a share at `position`; -1 if it fits nowhere."""
    head = rest - rest % granularity
    if spans_ranks or (head and numel - head <= share):
        return position + rest - head
    behind = start_behind(numel, granularity, share)
    return position + rest + behind if behind >= 0 else -1


def start_behind(numel: int, granularity: int, share: int) -> int:
    """How far behind a boundary a tensor starts that is not cut there, and once at most; -1 if it fits nowhere."""
    if numel <= share:
        return 0
    head = share - share % granularity
    return share - head if head and numel - head <= share else -1
