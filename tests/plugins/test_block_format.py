"""What a format asks of a tensor, and encoding in chunks into memory that lies ready."""

from __future__ import annotations

import pytest
import torch

from vescale_fsdp.formats.block_format import decode, decode_into, encode, encode_into, granularity_of, payload_nbytes
from vescale_fsdp.formats.tiling import Tiling
from vescale_fsdp.plugins import registry


@pytest.mark.parametrize(("name", "numel"), [("mxfp8", 5), ("mxfp6_e2m3", 20), ("mxfp4", 10)])
def test_what_may_not_be_cut_is_whole_blocks_and_whole_bytes(name: str, numel: int) -> None:
    assert granularity_of(registry().format(name), (33, 5)).numel == numel


@pytest.mark.parametrize("name", ["fp8_block", "mxfp6_e3m2", "mxfp4", "dynamic8_flat"])
@pytest.mark.parametrize("shape", [(300, 96), (33, 7), (3, 50, 40), (0, 4)], ids=str)
def test_chunks_written_in_place_are_the_bits_of_the_whole(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    format = registry().format(name)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(1)).flatten()
    whole = encode(format, full, shape)
    monkeypatch.setattr("vescale_fsdp.formats.block_format.CHUNK_NUMEL", 500)
    payload = torch.full((payload_nbytes(format, full.numel()) + 1,), 7, dtype=torch.uint8)
    scales = torch.zeros(Tiling(format.block_shape, shape).num_blocks + 1, dtype=format.scale_dtype)
    encode_into(format, full, shape, payload[:-1], scales[:-1])
    assert torch.equal(payload[:-1], whole.payload)
    assert torch.equal(scales[:-1], whole.scales)
    assert (payload[-1], scales[-1]) == (7, 0)
    values = torch.zeros(full.numel(), dtype=torch.bfloat16)
    decode_into(format, payload[:-1], scales[:-1], shape, values)
    assert torch.equal(values, decode(format, whole, shape, full.numel(), dtype=torch.bfloat16))
