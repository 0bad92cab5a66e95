"""8-bit codes for 256 values that lie dense near zero: the dynamic map of 8-bit optimizers (arXiv 2110.02861).

The map is the one that bitsandbytes publishes: seven decades, each with twice the values of the one below, and 0 and 1.

    scale = max |block|, at least 1e-12
    code = the index of the map's value nearest to block / scale; halfway goes up
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["Dynamic8", "dynamic_map", "nearest_codes"]

_LEAST_MAGNITUDE = 1e-12
_DECADES = 7


@dataclass(frozen=True)
class Dynamic8:
    """Relative precision over seven decades; without a sign, twice the values for what is never negative."""

    name: str
    block_shape: tuple[int, ...]
    signed: bool
    bits: int = 8
    scale_dtype: torch.dtype = torch.float32

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=_LEAST_MAGNITUDE)
        finite = scales.isfinite()
        # What a block with inf or nan is divided by does not matter: its scale will be nan, and every code is defined.
        ratios = blocks / torch.where(finite, scales, 1.0)
        codes = nearest_codes(ratios, self.signed)
        return codes, torch.where(finite, scales, torch.nan).squeeze(1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _look_up(_tables(self.signed, codes.device).values, codes) * scales.unsqueeze(1)


@functools.cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 values in order: within [-1, 1], or [0, 1] without a sign."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        # float32 from here to the product, as published: the bits of the map depend on it.
        steps = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (steps[:-1] + steps[1:]) / 2.0
        power = 10 ** (decade - _DECADES + 1)
        values += (power * middles).tolist()
        if signed:
            values += (-power * middles).tolist()
    values.sort()
    assert len(values) == 256
    assert all(low < high for low, high in pairwise(values))
    return tuple(values)


def nearest_codes(ratios: torch.Tensor, signed: bool) -> torch.Tensor:
    """Codes of values in [-1, 1], without a search: the upper half of a float32's bits leaves two codes to choose."""
    tables = _tables(signed, ratios.device)
    lower = _look_up(tables.lowest_code, (ratios.view(torch.int32) >> 16) + (1 << 15))
    return lower + (ratios >= _look_up(tables.next_up, lower))


def _look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # On CPUs an eighth of the time of table[index].
    return table.index_select(0, index.reshape(-1).int()).view(index.shape)


@dataclass(frozen=True, eq=False)
class _Tables:
    """values[c] of code c; next_up[c], the least float32 that is coded above c; lowest_code of each upper half."""

    values: torch.Tensor
    next_up: torch.Tensor
    lowest_code: torch.Tensor


@functools.cache
def _tables(signed: bool, device: torch.device) -> _Tables:
    with torch.inference_mode(False):  # constants that serving and training share
        values = torch.tensor(dynamic_map(signed))
        next_up = torch.cat([_thresholds(values[:-1], values[1:]), torch.tensor([torch.inf])])
        halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
        least = torch.where(halves < 0, halves | 0xFFFF, halves).view(torch.float32)
        # nan patterns are never looked up; as zeros they keep the search defined.
        lowest_code = torch.searchsorted(next_up, least.nan_to_num(0.0), right=True).to(torch.uint8)
        return _Tables(values.to(device), next_up.to(device), lowest_code.to(device))


def _thresholds(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The least float32 x with x - low >= (high - low) / 2 as float32 computes it: torchao's rule.

    That is monotone in x, so walk from the middle to the first neighbour that fulfils it.
    """
    middle = ((low.double() + high.double()) / 2).float()
    down, up = torch.tensor(-torch.inf), torch.tensor(torch.inf)
    for _ in range(4):
        middle = torch.nextafter(middle, down)
    for _ in range(8):
        is_up = middle - low >= (high - low) * 0.5
        middle = torch.where(is_up, middle, torch.nextafter(middle, up))
    return middle
