"""torch's CUDA caching allocator replayed over a trace: its documented rules, written as plainly as they can be."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

MIB = 2**20


@dataclass
class Block:
    begin: int
    size: int
    is_free: bool = True


def reserved_after(trace: Iterable[tuple[Hashable, int]]) -> int:
    """Bytes of all segments after a trace of (storage, its bytes from now on), of one stream, from empty memory."""
    segments: list[tuple[bool, list[Block]]] = []
    held: dict[Hashable, tuple[list[Block], Block]] = {}
    for storage, nbytes in trace:
        if storage in held:
            _free(*held.pop(storage))
        if nbytes:
            held[storage] = _allocate(segments, -(-nbytes // 512) * 512)
    return sum(block.size for _, blocks in segments for block in blocks)


def _allocate(segments: list[tuple[bool, list[Block]]], size: int) -> tuple[list[Block], Block]:
    """The smallest free block of its pool that is large enough, the oldest of equal ones; else a new segment."""
    small = size <= MIB
    fitting = [
        (block.size, number, block.begin, blocks, block)
        for number, (is_small, blocks) in enumerate(segments)
        if is_small == small
        for block in blocks
        if block.is_free and block.size >= size
    ]
    if fitting:
        _, _, _, blocks, block = min(fitting, key=lambda found: found[:3])
    else:
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        block = Block(0, whole)
        blocks = [block]
        segments.append((small, blocks))
    rest = block.size - size
    if (rest >= 512) if small else (rest > MIB):
        blocks.insert(blocks.index(block) + 1, Block(block.begin + size, rest))
        block.size = size
    block.is_free = False
    return blocks, block


def _free(blocks: list[Block], block: Block) -> None:
    """Join it with free neighbours."""
    block.is_free = True
    place = blocks.index(block)
    if place + 1 < len(blocks) and blocks[place + 1].is_free:
        block.size += blocks.pop(place + 1).size
    if place > 0 and blocks[place - 1].is_free:
        blocks[place - 1].size += block.size
        blocks.pop(place)
