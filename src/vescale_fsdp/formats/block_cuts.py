"""Whether cuts of other parallelisms leave a format's blocks whole, so that each part has the blocks of the whole.

(64, 96) in 128x128 blocks, Shard(0) over 2 ranks: 32 rows a rank, inside the only block      refused
(64, 96) in 1x32 blocks, Shard(1) over 3 ranks: 32 columns a rank, a block each               granted
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import VescaleError
from .block_format import BlockFormat

__all__ = ["block_step", "check_other_cuts"]


def check_other_cuts(fqn: str, shape: tuple[int, ...], cuts: Sequence[tuple[int, int]], format: BlockFormat) -> None:
    """Raise VescaleError, naming the parameter, if a cut splits a block of `format`.

    shape: of the full tensor. cuts: (dim, number of ranks) of each `Shard(dim)`, outermost first.
    """
    parts = list(shape)
    for dim, num_ranks in cuts:
        parts[dim] = -(-parts[dim] // num_ranks)
    for dim in sorted({dim for dim, _ in cuts}):
        step = block_step(shape, dim, format.block_shape)
        if parts[dim] < shape[dim] and parts[dim] % step:
            block = "x".join(map(str, format.block_shape))
            raise VescaleError(
                f"{fqn}: Shard({dim}) leaves {parts[dim]} of {shape[dim]} on a rank, which splits {block} blocks of "
                f"{format.name}: cuts along dim {dim} must fall every {step}. Cut it over fewer ranks, or let "
                f"param_policy give no such format for it."
            )


def block_step(shape: tuple[int, ...], dim: int, block: tuple[int, ...]) -> int:
    """How far apart cuts along `dim` must be so that none splits a block; `shape[dim]` if none may be made."""
    if len(block) == 1:
        return _flat_step(shape, dim, block[0])
    rows, columns = block
    if len(shape) == 3:
        return (1, rows, columns)[dim]
    if len(shape) < 2:
        return columns
    return rows if dim == 0 else _flat_step(shape[1:], dim - 1, columns)


def _flat_step(shape: tuple[int, ...], dim: int, length: int) -> int:
    """For blocks of `length` elements of the flattened tensor."""
    inner = math.prod(shape[dim + 1 :])
    if math.prod(shape[:dim]) > 1 and shape[dim] * inner % length:
        return max(shape[dim], 1)
    return length // math.gcd(length, inner)
