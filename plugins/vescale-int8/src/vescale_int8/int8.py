"""Signed 8-bit integers, scaled so that the largest magnitude of a block is 127.

    scale = max |block| / 127      float32
    code = round(block / scale)    to nearest, ties to even; two's complement

A block of zeros has scale 0 and codes 0; a block that holds inf or nan has the scale nan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Int8"]

_LARGEST = 127


@dataclass(frozen=True)
class Int8:
    """Equal steps over [-max, max]: for values of similar size, such as gradients and momenta."""

    name: str
    block_shape: tuple[int, ...]
    bits: int = 8
    scale_dtype: torch.dtype = torch.float32
    scale_suffix: str = "_scale_inv"
    """Of the scales' name in safetensors files, as block-wise INT8 versions of DeepSeek-V3 name them."""
    file_dtype: torch.dtype = torch.int8
    """Of the codes in safetensors files."""

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.abs().amax(dim=1, keepdim=True) / _LARGEST
        finite = scales.isfinite()
        steps = (blocks / torch.where(finite & (scales > 0), scales, 1.0)).round_()
        codes = steps.nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return codes.view(torch.uint8), torch.where(finite, scales, torch.nan).squeeze(1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float() * scales.unsqueeze(1)
