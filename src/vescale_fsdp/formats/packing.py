"""Codes narrower than a byte, as bytes: two 4-bit codes in one byte, four 6-bit codes in three.

The first code lies in the lowest bits, as in torch's float4_e2m1fn_x2:

    4 bits   byte 0 = bbbbaaaa
    6 bits   byte 0 = bbaaaaaa, byte 1 = ccccbbbb, byte 2 = ddddddcc
    8 bits   as they are

A run that does not fill its last byte is filled up with zero bits.
"""

from __future__ import annotations

import torch

from ..errors import VescaleError

__all__ = ["codes_per_pack", "pack", "packed_numel", "unpack"]

_CODES_PER_PACK = {8: 1, 6: 4, 4: 2}


def codes_per_pack(bits: int) -> int:
    """Fewest codes of `bits` bits that fill whole bytes: no cut may split them."""
    if bits not in _CODES_PER_PACK:
        raise VescaleError(f"codes have {sorted(_CODES_PER_PACK)} bits, got {bits}")
    return _CODES_PER_PACK[bits]


def packed_numel(numel: int, bits: int) -> int:
    """Bytes that `numel` codes take."""
    return -(-numel * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes, one each, as bytes."""
    if codes_per_pack(bits) == 1:
        return codes
    numel = codes.numel()
    if rest := -numel % codes_per_pack(bits):
        codes = torch.nn.functional.pad(codes, (0, rest))
    if bits == 4:
        return codes[0::2] | (codes[1::2] << 4)
    a, b, c, d = codes.view(-1, 4).unbind(1)
    packed = torch.stack((a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)), dim=1).view(-1)
    return packed[: packed_numel(numel, bits)]


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """The `numel` codes that `pack` made `packed` of."""
    if codes_per_pack(bits) == 1:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:numel]
    if rest := -packed.numel() % 3:
        packed = torch.nn.functional.pad(packed, (0, rest))
    x, y, z = packed.view(-1, 3).unbind(1)
    codes = torch.stack((x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2), dim=1)
    return codes.view(-1)[:numel]
