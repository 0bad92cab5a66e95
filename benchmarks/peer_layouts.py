"""How much other systems pad: share per rank, in elements, of one group of tensors, from public descriptions.

Every function takes tensors in module order and returns S, the elements that each of `num_ranks` ranks stores; a
gathered buffer is num_ranks * S. Shares are multiples of `unit` elements for all of them, as they are for our planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PEERS", "Tensor", "fsdp2_blocks", "fsdp2_stock", "megatron_lcm", "paper_style"]


@dataclass(frozen=True)
class Tensor:
    """`granularity` elements may not be cut, at most the whole tensor, which then stays on one rank."""

    shape: tuple[int, ...]
    granularity: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "granularity", max(min(self.granularity, self.numel), 1))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def fsdp2_stock(tensors: Sequence[Tensor], num_ranks: int, unit: int) -> int:
    """FSDP2 as it is: every tensor is padded along dim 0 to equal chunks. It knows no blocks, and cuts them."""
    chunks = (_ceil(t.shape[0] if t.shape else 1, num_ranks) * math.prod(t.shape[1:]) for t in tensors)
    return _up(sum(chunks), unit)


def fsdp2_blocks(tensors: Sequence[Tensor], num_ranks: int, unit: int) -> int:
    """FSDP2's even split with whole blocks: every rank stores as many blocks of a tensor as the fullest."""
    chunks = (_ceil(_ceil(t.numel, t.granularity), num_ranks) * t.granularity for t in tensors)
    return _up(sum(chunks), unit)


def megatron_lcm(tensors: Sequence[Tensor], num_ranks: int, unit: int) -> int:
    """Megatron-FSDP: a grid of chunks of lcm(granularities); a tensor starts or ends on the grid, small ones fill gaps.

    Where two large tensors meet, the rest of one and the rest of the next may share a chunk.
    """
    chunk = unit
    for tensor in tensors:
        if tensor.granularity < tensor.numel:
            chunk = math.lcm(chunk, tensor.granularity)
    for tensor in tensors:
        if tensor.granularity >= tensor.numel:  # never cut: it only has to fit into chunks
            chunk = _up(max(chunk, tensor.numel), chunk)
    large = [t.numel for t in tensors if t.numel >= chunk]
    small = sorted((_up(t.numel, unit) for t in tensors if t.numel < chunk), reverse=True)
    gaps = _gaps_between(large, chunk, unit)
    chunks = sum(numel // chunk for numel in large) + len(gaps)
    for numel in small:
        at = next((at for at, gap in enumerate(gaps) if gap >= numel), None)
        if at is None:
            chunks += 1
            gaps.append(chunk)
            at = len(gaps) - 1
        gaps[at] -= numel
    return _ceil(chunks, num_ranks) * chunk


def _gaps_between(large: Sequence[int], chunk: int, unit: int) -> list[int]:
    """Room in the chunks that hold the rests of large tensors: two rests where they fit, else one."""
    gaps: list[int] = []
    room: int | None = None
    for rest in (_up(numel % chunk, unit) for numel in large if numel % chunk):
        if room is not None and room >= rest:
            gaps.append(room - rest)
            room = None
        else:
            if room is not None:
                gaps.append(room)
            room = chunk - rest
    return gaps if room is None else [*gaps, room]


def paper_style(tensors: Sequence[Tensor], num_ranks: int, unit: int) -> int:
    """The heuristic of arXiv 2602.22437, rebuilt from its description.

    For each of three orders (as defined, by shape, by block) and each prefix of the tensors by size: those in the
    prefix may cover whole ranks, so the share is a multiple of the lcm of their blocks; the others cross one boundary.
    Within such a choice feasibility is monotone, and the share is found by bisection.
    """
    best: int | None = None
    for key in (None, _by_shape, _by_block):
        ordered = [_Block.of(t, unit) for t in (sorted(tensors, key=key) if key else tensors) if t.numel]
        covering: set[_Block] = set()
        step = 1
        for tensor in [None, *sorted(set(ordered), key=lambda block: -block.numel)]:
            if tensor is not None:
                covering.add(tensor)
                step = math.lcm(step, tensor.granularity)
            if best is not None and step >= best:
                break
            share = _bisect(ordered, covering, num_ranks, step)
            best = share if best is None else min(best, share)
    return (best or 0) * unit


def _by_shape(tensor: Tensor) -> Any:  # something that sorts
    return tuple(-size for size in tensor.shape)


def _by_block(tensor: Tensor) -> Any:
    return (-tensor.granularity, -tensor.numel)


@dataclass(frozen=True)
class _Block:
    """A tensor counted in units."""

    numel: int
    granularity: int

    @classmethod
    def of(cls, tensor: Tensor, unit: int) -> _Block:
        numel = _ceil(tensor.numel, unit)
        return cls(numel, min(math.lcm(tensor.granularity, unit) // unit, numel))


def _bisect(ordered: Sequence[_Block], covering: set[_Block], num_ranks: int, step: int) -> int:
    least = max(1, _ceil(sum(block.numel for block in ordered), step * num_ranks))
    low, high = least - 1, least
    while not _fits(ordered, covering, high * step, num_ranks):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(ordered, covering, middle * step, num_ranks):
            high = middle
        else:
            low = middle
    return high * step


def _fits(ordered: Sequence[_Block], covering: set[_Block], share: int, num_ranks: int) -> bool:
    """Place each tensor as early as it may lie; true if all end within the ranks."""
    position = 0
    for block in ordered:
        room = share - position % share
        if block.numel <= room:
            position += block.numel
            continue
        head = room // block.granularity * block.granularity
        if block in covering or (head and block.numel - head <= share):
            position += room - head + block.numel
        elif block.numel <= share:
            position += room + block.numel
        else:
            head = share // block.granularity * block.granularity
            if not head or block.numel - head > share:
                return False
            position += room + share - head + block.numel
        if position > num_ranks * share:
            return False
    return position <= num_ranks * share


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _up(value: int, step: int) -> int:
    return _ceil(value, step) * step


PEERS: dict[str, Callable[[Sequence[Tensor], int, int], int]] = {
    "paper_style": paper_style,
    "fsdp2_even_blocks": fsdp2_blocks,
    "fsdp2_stock": fsdp2_stock,
    "megatron_lcm": megatron_lcm,
}
