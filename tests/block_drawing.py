"""The blocks of a tensor found with plain loops, for comparison."""

from __future__ import annotations

import math


def blocks_by_drawing(shape: tuple[int, ...], block: tuple[int, ...]) -> list[list[int]]:
    """The flat indices of each block's elements, found with plain loops."""
    if len(block) == 1:
        flat = list(range(math.prod(shape)))
        return [flat[i : i + block[0]] for i in range(0, len(flat), block[0])]
    stack, height, width = {0: (1, 1, 1), 1: (1, 1, *shape), 3: shape}.get(
        len(shape), (1, *shape[:1], math.prod(shape[1:]))
    )
    return [
        [
            (matrix * height + row) * width + column
            for row in range(top, min(top + block[0], height))
            for column in range(left, min(left + block[1], width))
        ]
        for matrix in range(stack)
        for top in range(0, height, block[0])
        for left in range(0, width, block[1])
    ]
