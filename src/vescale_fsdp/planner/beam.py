"""All orders at one share, by how many tensors of each kind are placed: a complete search that fails is a proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .classes import ShareClass
from .greedy import start_behind
from .problem import Order, Problem, in_runs

__all__ = ["Beam", "beam_search"]

MIN_WIDTH = 4
"""States per layer, however many layers there are."""


@dataclass(frozen=True, slots=True)
class Beam:
    """What a search found: an order that fits, or nothing; `complete` if no order was left out."""

    order: Order | None
    complete: bool
    num_steps: int


class _Move(NamedTuple):
    """Placing one more tensor of a kind: where a state counts it, the tensor, and how far behind the next boundary it
    starts where it cannot be cut there."""

    one: int
    mask: int
    full: int
    numel: int
    granularity: int
    spans_ranks: bool
    behind: int


_Layer = dict[int, tuple[int, int, int]]
"""From a state, how many tensors of each kind are placed in a bit field per kind, to (least gaps, elements placed, kind
placed last)."""


def beam_search(problem: Problem, share_class: ShareClass, share: int, *, max_steps: int) -> Beam:
    """Layer n holds, for each way to have placed n tensors, the earliest end: no later one serves the rest better.

    A state that has left more gaps than the buffer can spare is dropped; where a layer holds more states than
    `max_steps` allow, those with the most gaps are.
    """
    spare = problem.num_ranks * share - problem.numel
    moves = _moves(problem, share_class, share, spare + 1)
    num_tensors = sum(kind.count for kind in problem.kinds)
    width = max(MIN_WIDTH, max_steps // (num_tensors * len(moves)))
    layers: list[_Layer] = [{0: (0, 0, -1)}]
    complete, num_steps = True, 0
    for _ in range(num_tensors):
        num_steps += len(layers[-1]) * len(moves)
        layer = _extend(layers[-1], moves, share, spare)
        if not layer:
            return Beam(None, complete, num_steps)
        if len(layer) > width:
            complete = False
            least = sorted([(gaps, state) for state, (gaps, _, _) in layer.items()])[:width]
            layer = {state: layer[state] for _, state in least}
        layers.append(layer)
    return Beam(_order(layers, moves), complete, num_steps)


def _moves(problem: Problem, share_class: ShareClass, share: int, nowhere: int) -> list[_Move]:
    moves, bit = [], 0
    for kind, spans_ranks in zip(problem.kinds, share_class.spans_ranks, strict=True):
        start = start_behind(kind.numel, kind.granularity, share)
        behind = start if start >= 0 else nowhere
        bits = kind.count.bit_length()
        mask, full = (1 << bits) - 1 << bit, kind.count << bit
        moves.append(_Move(1 << bit, mask, full, kind.numel, kind.granularity, spans_ranks, behind))
        bit += bits
    return moves


def _extend(layer: _Layer, moves: Sequence[_Move], share: int, spare: int) -> _Layer:
    following: _Layer = {}
    known = following.get
    states = [(state, gaps, placed, share - (placed + gaps) % share) for state, (gaps, placed, _) in layer.items()]
    for kind, (one, mask, full, numel, granularity, spans_ranks, behind) in enumerate(moves):
        for state, gaps, placed, rest in states:
            if state & mask == full:
                continue
            if numel > rest:
                tail = rest % granularity
                is_cut = spans_ranks or (tail < rest and numel - rest + tail <= share)
                gaps += tail if is_cut else rest + behind
                if gaps > spare:
                    continue
            target = state + one
            best = known(target)
            if best is None or gaps < best[0]:
                following[target] = (gaps, placed + numel, kind)
    return following


def _order(layers: Sequence[_Layer], moves: Sequence[_Move]) -> Order:
    (state,) = layers[-1]
    kinds: list[int] = []
    for layer in reversed(layers[1:]):
        kinds.append(layer[state][2])
        state -= moves[kinds[-1]].one
    return in_runs(reversed(kinds))
