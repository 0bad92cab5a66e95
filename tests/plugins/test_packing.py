"""Codes as bytes and back, at every odd length, and the published order of bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from vescale_fsdp.errors import VescaleError
from vescale_fsdp.formats.packing import codes_per_pack, pack, packed_numel, unpack


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("numel", range(14))
def test_unpack_gives_back_what_was_packed(bits: int, numel: int) -> None:
    codes = torch.randint(0, 2**bits, (numel,), generator=torch.Generator().manual_seed(numel), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.numel() == packed_numel(numel, bits) == (numel * bits + 7) // 8
    assert torch.equal(unpack(packed, bits, numel), codes)


def test_six_bit_codes_are_one_little_endian_stream_of_bits() -> None:
    codes = torch.tensor([0b000001, 0b000010, 0b000100, 0b111111], dtype=torch.uint8)
    stream = sum(code << 6 * i for i, code in enumerate(codes.tolist()))
    assert bytes(pack(codes, 6).tolist()) == stream.to_bytes(3, "little")


def test_the_first_of_two_four_bit_codes_is_the_low_one() -> None:
    values = np.array([1.5, -6.0], dtype=ml_dtypes.float4_e2m1fn)
    low, high = values.view(np.uint8).tolist()
    assert pack(torch.tensor([low, high], dtype=torch.uint8), 4).tolist() == [low | high << 4]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_pieces_cut_between_packs_pack_to_the_pieces_of_the_packed_whole(bits: int) -> None:
    codes = torch.arange(24, dtype=torch.uint8) % 16
    step = codes_per_pack(bits)
    for cut in range(0, 25, step):
        assert torch.equal(torch.cat([pack(codes[:cut], bits), pack(codes[cut:], bits)]), pack(codes, bits))


def test_other_widths_are_refused() -> None:
    with pytest.raises(VescaleError, match=r"codes have \[4, 6, 8\] bits, got 5"):
        codes_per_pack(5)
