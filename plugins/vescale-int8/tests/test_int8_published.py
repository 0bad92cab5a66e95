"""Signed integers against numpy, the dynamic map against torchao's port of bitsandbytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vescale_int8 import INT8_FORMATS, dynamic_map
from vescale_int8.dynamic import nearest_codes

from vescale_fsdp.formats import decode, encode

torchao_optim = pytest.importorskip("torchao.optim.quant_utils")


def values(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(numel, generator=generator) * torch.exp(4 * torch.randn(numel, generator=generator))


def test_signed_integers_are_multiples_of_a_127th_of_the_largest_magnitude() -> None:
    x = values(256 * 5 + 17)
    encoded = encode(INT8_FORMATS["int8_flat"], x, (x.numel(),))
    for i, scale in enumerate(encoded.scales.numpy()):
        block = x[256 * i : 256 * (i + 1)].numpy()
        assert scale == np.abs(block).max() / np.float32(127)
        codes = encoded.payload[256 * i : 256 * (i + 1)].view(torch.int8).numpy()
        assert (codes == np.rint(block / scale)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed: bool) -> None:
    assert dynamic_map(signed) == tuple(torchao_optim.create_dynamic_map(signed))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_scales_and_decoded_values_equal_torchaos(signed: bool) -> None:
    format = INT8_FORMATS["dynamic8_flat" if signed else "dynamic8_flat_unsigned"]
    x = values(256 * 40) if signed else values(256 * 40).abs()
    qmap = torch.tensor(torchao_optim.create_dynamic_map(signed))
    scaled, scales = torchao_optim.scale_tensor(x, 256)
    codes = torchao_optim.quantize_8bit_with_qmap(scaled, qmap)
    encoded = encode(format, x, (x.numel(),))
    assert torch.equal(encoded.payload, codes)
    assert torch.equal(encoded.scales, scales)
    assert torch.equal(
        decode(format, encoded, (x.numel(),), x.numel()), torchao_optim.dequant_with_qmap(codes, qmap, scales)
    )


@pytest.mark.parametrize("signed", [True, False])
def test_every_float_around_every_threshold_gets_torchaos_code(signed: bool) -> None:
    qmap = torch.tensor(torchao_optim.create_dynamic_map(signed))
    middles = (qmap[1:] + qmap[:-1]) / 2
    steps = torch.arange(-40, 41, dtype=torch.int32)
    near = (torch.cat([qmap, middles]).view(torch.int32)[:, None] + steps).flatten().view(torch.float32)
    x = torch.cat([near[near.isfinite()], torch.linspace(-1 if signed else 0, 1, 100_001), torch.tensor([0.0, -0.0])])
    x = x.clamp(-1 if signed else 0, 1)
    assert torch.equal(nearest_codes(x, signed), torchao_optim.quantize_8bit_with_qmap(x, qmap))
