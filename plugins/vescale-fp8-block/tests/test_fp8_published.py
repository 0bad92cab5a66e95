"""FP8 blocks against the published arithmetic, spelled out with numpy and ml_dtypes."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
import torch
from vescale_fp8_block import FP8_FORMATS, Fp8Block

from vescale_fsdp.formats import encode

ELEMENTS = {torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0), torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0)}


def published(block: np.ndarray, format: Fp8Block) -> tuple[np.ndarray, float]:
    """Codes and scale of one block: DeepSeek-V3's recipe as torchao's blockwise_fp8_training computes it."""
    dtype, largest = ELEMENTS[format.element_dtype]
    magnitude = max(np.float64(np.abs(block).max()), 1e-12)
    factor = np.float32(largest / magnitude)
    if format.name.endswith("_pow2"):
        factor = np.float32(2.0 ** np.floor(np.log2(np.float64(factor))))
    codes = np.clip(block * factor, -largest, largest).astype(dtype).view(np.uint8)
    return codes, float(np.float32(1) / factor)


def values(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("name", FP8_FORMATS)
@pytest.mark.parametrize("shape", [(256, 384), (200, 300)], ids=str)
def test_codes_and_scales_are_the_published_ones(name: str, shape: tuple[int, int]) -> None:
    format = FP8_FORMATS[name]
    x = values(shape)
    rows, columns = format.block_shape
    encoded = encode(format, x.flatten(), shape)
    codes = encoded.payload.view(shape).numpy()
    scales = encoded.scales if encoded.scales.dtype == torch.float32 else encoded.scales.view(torch.float8_e8m0fnu)
    found = iter(scales.float().tolist())
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            block = (slice(top, top + rows), slice(left, left + columns))
            expected, scale = published(x.numpy()[block], format)
            assert (codes[block] == expected).all()
            assert next(found) == scale
    assert next(found, None) is None


@pytest.mark.parametrize("name", ["fp8_block", "fp8_row"])
def test_blocks_equal_torchaos(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its reference is plain torch, in a file that imports triton, which CPU builds of torch lack.
    for module in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, module, MagicMock())
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x, format = values((256, 384)), FP8_FORMATS[name]
    whole = name == "fp8_block"
    reference = kernels.torch_blockwise_scale_weight_quant if whole else kernels.torch_blockwise_scale_act_quant_lhs
    codes, scales = reference(x)
    encoded = encode(format, x.flatten(), (256, 384))
    assert torch.equal(encoded.payload, codes.view(torch.uint8).flatten())
    assert torch.equal(encoded.scales, scales.contiguous().flatten())


def test_one_scale_of_two_blocks_is_one_448th_of_the_largest_magnitude() -> None:
    x = torch.zeros(128, 256)
    x[3, 5], x[100, 200] = -896.0, 0.875
    encoded = encode(FP8_FORMATS["fp8_block"], x.flatten(), (128, 256))
    assert encoded.scales.tolist() == [2.0, 0.875 / 448]
    assert encoded.payload.view(128, 256)[3, 5].item() == 0xFE  # -448


def test_power_of_two_scales_round_up_so_that_nothing_saturates() -> None:
    x = torch.full((1, 128), 450.0)
    encoded = encode(FP8_FORMATS["fp8_row_pow2"], x.flatten(), (1, 128))
    assert encoded.scales.tolist() == [127 + 1]  # 2 ** 1
