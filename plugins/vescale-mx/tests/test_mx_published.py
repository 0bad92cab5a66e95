"""MX blocks against torchao and against the specification, spelled out with ml_dtypes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from vescale_mx import MX_FORMATS
from vescale_mx.small_float import E2M1, E2M3, E3M2, SmallFloat

from vescale_fsdp.formats import decode, encode, pack, unpack

ELEMENTS = {
    "mxfp8": (ml_dtypes.float8_e4m3fn, 448.0, 8),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 2),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 4),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 6.0, 2),
}
"""dtype, largest value, and emax_elem of the specification's table 1."""


def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 96, generator=generator) * torch.exp(6 * torch.randn(64, 96, generator=generator))
    x[0, :32], x[1, :32], x[2, :32] = 0.0, -0.0, 1.0
    return x


def specified(block: np.ndarray, name: str) -> tuple[np.ndarray, int]:
    """Section 6.3: a shared scale, then elements that saturate and round to nearest even."""
    dtype, largest, emax = ELEMENTS[name]
    magnitude = float(np.abs(block).max())
    exponent = max(math.frexp(magnitude)[1] - 1 - emax, -127) if magnitude else -127
    elements = np.clip(block.astype(np.float64) / 2.0**exponent, -largest, largest).astype(np.float32)
    return elements.astype(dtype).view(np.uint8), exponent + 127


@pytest.mark.parametrize("name", MX_FORMATS)
@pytest.mark.parametrize("size", [1.0, 2.0**-120, 2.0**-140, 2.0**100], ids=["ones", "small", "subnormal", "large"])
def test_codes_and_scales_are_the_specified_ones(name: str, size: float) -> None:
    x = values().clamp(-(2.0**20), 2.0**20) * size
    encoded = encode(MX_FORMATS[name], x.flatten(), (64, 96))
    codes = unpack(encoded.payload, MX_FORMATS[name].bits, 64 * 96).view(-1, 32).numpy()
    for block, found, scale in zip(x.view(-1, 32).numpy(), codes, encoded.scales.tolist(), strict=True):
        expected, expected_scale = specified(block, name)
        assert scale == expected_scale
        assert (found == expected).all()


@pytest.mark.parametrize("name", MX_FORMATS)
def test_codes_scales_and_decoded_values_equal_torchaos(name: str) -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    elements: dict[str, Any] = {
        "mxfp8": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp4": torch.float4_e2m1fn_x2,
    }
    x, format = values(), MX_FORMATS[name]
    scales, codes = mx_tensor.to_mx(x, elements[name], 32)
    encoded = encode(format, x.flatten(), (64, 96))
    payload = codes.view(torch.uint8).flatten()
    assert torch.equal(encoded.payload, pack(payload, 6) if format.bits == 6 else payload)
    assert torch.equal(encoded.scales, scales.view(torch.uint8).flatten())
    expected = mx_tensor.to_dtype(codes, scales, elements[name], 32, torch.float32)
    assert torch.equal(decode(format, encoded, (64, 96), 64 * 96).view(64, 96), expected)


@pytest.mark.parametrize(
    ("element", "dtype"),
    [(E2M1, ml_dtypes.float4_e2m1fn), (E2M3, ml_dtypes.float6_e2m3fn), (E3M2, ml_dtypes.float6_e3m2fn)],
    ids=["E2M1", "E2M3", "E3M2"],
)
def test_small_floats_round_and_decode_as_ml_dtypes_does(element: SmallFloat, dtype: Any) -> None:
    steps = torch.linspace(-element.largest, element.largest, 10_001)
    every_code = torch.from_numpy(np.arange(2**element.bits, dtype=np.uint8).view(dtype).astype(np.float32))
    ties = (every_code.sort().values[:-1] + every_code.sort().values[1:]) / 2
    x = torch.cat([steps, every_code, ties, torch.tensor([0.0, -0.0, 1e-40, -1e-40])])
    assert element.encode(x).tolist() == x.numpy().astype(dtype).view(np.uint8).tolist()
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    assert torch.equal(element.decode(codes), every_code)
    assert (
        element.encode(torch.tensor([1e9, -1e9])).tolist()
        == element.encode(torch.tensor([element.largest, -element.largest])).tolist()
    )


def test_a_block_with_nan_has_the_scale_nan() -> None:
    x = torch.ones(2, 32)
    x[1, 7] = torch.nan
    assert encode(MX_FORMATS["mxfp8"], x.flatten(), (2, 32)).scales.tolist() == [127 - 8, 255]
