"""safetensors: what we write, the safetensors package reads, and the other way round; shards read their parts alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from vescale_fsdp import CheckpointError, ParamPolicy, export_safetensors, fully_shard, import_safetensors

safetensors = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    def __init__(self, rows: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.mix = nn.Linear(6, 7)
        self.head = nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([2.5]))
        self.register_buffer("count", torch.tensor(3))


def plain(seed: int, rows: int = 11) -> Tied:
    torch.manual_seed(seed)
    return Tied(rows)


def shared_folder() -> Path:
    found: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@ranks(3)
def test_the_safetensors_package_reads_what_is_exported_with_an_index() -> None:
    """A41: index, dtypes, and tied weights once."""
    folder, expected = shared_folder(), plain(1).state_dict()
    export_safetensors(fully_shard(plain(1)), folder, shard_nbytes=300)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: safetensors.load_file(folder / name) for name in set(index["weight_map"].values())}
    assert len(files) == 2
    assert set(index["weight_map"]) == set(expected) - {"head.weight"}
    assert index["metadata"]["total_size"] == 11 * 6 * 4 + (7 * 6 + 7) * 4 + 4 + 8
    for fqn, name in index["weight_map"].items():
        assert torch.equal(files[name][fqn], expected[fqn]), fqn


@ranks(2)
def test_one_file_with_another_dtype_and_tied_names_is_loadable_by_safetensors_itself() -> None:
    folder = shared_folder()
    export_safetensors(fully_shard(plain(1)), folder, dtype=torch.bfloat16)
    model = plain(2).bfloat16()
    safetensors.load_model(model, folder / "model.safetensors")
    assert torch.equal(model.head.weight, plain(1).embed.weight.bfloat16())
    assert model.count.dtype == torch.int64


@ranks(3)
def test_every_engine_reads_what_safetensors_wrote() -> None:
    folder = shared_folder()
    expected = plain(1)
    if dist.get_rank() == 0:
        safetensors.save_model(expected, str(folder / "model.safetensors"))
    dist.barrier()
    for model in (fully_shard(plain(2)), fsdp2(plain(2)), plain(2)):
        import_safetensors(model, folder)
        for fqn, value in model.state_dict().items():
            assert torch.equal(whole(value), expected.state_dict()[fqn]), fqn
        assert model.head.weight is model.embed.weight


@ranks(2)
def test_names_shapes_and_truncation_are_named_on_all_ranks_before_anything_changes() -> None:
    folder = shared_folder()
    export_safetensors(fully_shard(plain(1)), folder)
    model = fully_shard(plain(2, rows=12))
    before = whole(model.mix.weight)
    with pytest.raises(CheckpointError, match=r"embed.weight: expected shape \(12, 6\), the file has \(11, 6\)"):
        import_safetensors(model, folder)
    with pytest.raises(CheckpointError, match=r"mix.bias: no tensor x.mix.bias in the files"):
        import_safetensors(model, folder, rename=lambda fqn: f"x.{fqn}")
    dist.barrier()
    path = folder / "model.safetensors"
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes()[:-4])
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated"):
        import_safetensors(fully_shard(plain(2)), folder)
    assert torch.equal(whole(model.mix.weight), before)


@ranks(2)
def test_exporting_and_importing_under_other_names() -> None:
    folder = shared_folder()
    export_safetensors(fully_shard(plain(1)), folder, rename=lambda fqn: f"model.{fqn}")
    model = fully_shard(plain(2))
    import_safetensors(model, folder, rename=lambda fqn: f"model.{fqn}")
    assert torch.equal(whole(model.embed.weight), plain(1).embed.weight)


# --- block formats


def in_format(name: str) -> Callable[[str, torch.Tensor], ParamPolicy | None]:
    return lambda fqn, param: ParamPolicy(format=name) if param.ndim >= 2 else None


in_fp8 = in_format("fp8_block")


def linear(seed: int) -> nn.Module:
    """Two by three blocks of 128x128, of which most are short."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 200))


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales block by block, as the DeepSeek-V3 report describes them (section 3.3)."""
    codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(2, 3)
    for i in range(2):
        for j in range(3):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            factor = (448 / block.abs().max().double()).float()
            codes[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (block * factor).to(torch.float8_e4m3fn)
            scales[i, j] = 1 / factor
    return codes, scales


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    codes, scales = quantised(weight)
    return codes.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]


@ranks(3)
def test_a_block_format_is_exported_as_codes_and_scales_under_deepseeks_names() -> None:
    folder, weight = shared_folder(), linear(1)[0].weight.detach()
    export_safetensors(fully_shard(linear(1)), folder, param_policy=in_fp8, dtype=torch.bfloat16)
    found = safetensors.load_file(folder / "model.safetensors")
    assert sorted(found) == ["0.bias", "0.weight", "0.weight_scale_inv"]
    codes, scales = quantised(weight)
    assert found["0.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["0.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found["0.weight_scale_inv"], scales)
    assert found["0.bias"].dtype == torch.bfloat16


@ranks(3)
def test_codes_that_another_program_wrote_are_decoded_into_any_cut() -> None:
    folder, source = shared_folder(), linear(1)[0]
    codes, scales = quantised(source.weight.detach())
    tensors = {"0.weight": codes, "0.weight_scale_inv": scales, "0.bias": source.bias.detach()}
    if dist.get_rank() == 0:
        safetensors.save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    by_sevens = fully_shard(linear(2), param_policy=lambda fqn, param: ParamPolicy(granularity=7))
    for model in (by_sevens, fsdp2(linear(2)), linear(2)):
        import_safetensors(model, folder)
        assert torch.equal(whole(model[0].weight), dequantised(source.weight.detach()))
        assert torch.equal(whole(model[0].bias), source.bias)


@ranks(2)
def test_codes_without_scales_and_formats_that_no_file_holds_are_refused_by_name() -> None:
    folder, model = shared_folder(), fully_shard(linear(1))
    codes, scales = quantised(linear(1)[0].weight.detach())
    tensors = {"0.weight": codes, "0.bias": torch.zeros(200), "0.weight_scale_inv": scales[:, :2].contiguous()}
    if dist.get_rank() == 0:
        safetensors.save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    before = whole(model[0].bias)
    with pytest.raises(CheckpointError, match=r"0.weight: the file has codes, torch.float8_e4m3fn, but no scales"):
        import_safetensors(model, folder)
    with pytest.raises(CheckpointError, match="mxfp6_e2m3: has no file_dtype and scale_suffix"):
        export_safetensors(model, folder, param_policy=lambda fqn, param: ParamPolicy(format="mxfp6_e2m3"))
    with pytest.raises(CheckpointError, match=r"0.weight: mxfp4 of shape \(200, 300\) has no form in files"):
        export_safetensors(model, folder, param_policy=in_format("mxfp4"))
    assert torch.equal(whole(model[0].bias), before)


@ranks(2)
def test_files_reach_frozen_shards_that_are_stored_as_codes() -> None:
    folder = shared_folder()
    export_safetensors(fully_shard(linear(1)), folder, param_policy=in_fp8)
    model = linear(2)
    model[0].weight.requires_grad_(False)
    fully_shard(model, param_policy=in_fp8)
    import_safetensors(model, folder)
    found = model.state_dict()["0.weight"].full_tensor()
    torch.testing.assert_close(found, dequantised(linear(1)[0].weight.detach()), rtol=1e-6, atol=0)


# --- microscaling formats

HALVES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([HALVES, -HALVES])
"""The values of the 4-bit codes: OCP MX specification, section 5.3.3."""


class Experts(nn.Module):
    """A stack of matrices beside one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(2, 6, 64))
        self.router = nn.Linear(64, 5)


def experts(seed: int) -> Experts:
    torch.manual_seed(seed)
    return Experts()


def exponents(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """E8M0 scales of blocks of 32, section 6.3 of the specification; `largest` is the element's largest exponent."""
    blocks = weight.detach().unflatten(-1, (-1, 32))
    return blocks.abs().amax(-1).log2().floor() - largest + 127


def factors(scales: torch.Tensor) -> torch.Tensor:
    return (scales.float() - 127).exp2().repeat_interleave(32, -1)


def in_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, one each, and scales."""
    scales = exponents(weight, 2)
    steps = weight.detach() / factors(scales)
    nearest = (steps.abs().unsqueeze(-1) - HALVES).abs().argmin(-1)  # random values hit no ties
    return (nearest + 8 * steps.signbit()).to(torch.uint8), scales.to(torch.uint8)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Two codes of each byte, the low one first, as compressed-tensors and gpt-oss have them."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@ranks(3)
def test_mxfp4_is_exported_as_compressed_tensors_and_gpt_oss_name_it() -> None:
    folder, expected = shared_folder(), experts(1)
    export_safetensors(fully_shard(experts(1)), folder, param_policy=in_format("mxfp4"))
    found = safetensors.load_file(folder / "model.safetensors")
    parts = ["router.bias", "router.weight_packed", "router.weight_scale", "up_proj_blocks", "up_proj_scales"]
    assert sorted(found) == parts
    shapes = [(5,), (5, 32), (5, 2), (2, 6, 2, 16), (2, 6, 2)]
    assert [tuple(found[name].shape) for name in parts] == shapes
    assert all(found[name].dtype == torch.uint8 for name in parts[1:])
    for codes, scales, weight in [
        (nibbles(found["router.weight_packed"]), found["router.weight_scale"], expected.router.weight),
        (nibbles(found["up_proj_blocks"]).flatten(-2), found["up_proj_scales"], expected.up_proj),
    ]:
        wanted_codes, wanted_scales = in_mxfp4(weight)
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(codes, wanted_codes)


@ranks(2)
def test_mxfp8_is_exported_under_its_own_name_with_exponents_beside_it() -> None:
    folder, weight = shared_folder(), experts(1).router.weight.detach()
    export_safetensors(fully_shard(experts(1)), folder, param_policy=in_format("mxfp8"))
    found = safetensors.load_file(folder / "model.safetensors")
    assert sorted(found) == ["router.bias", "router.weight", "router.weight_scale", "up_proj", "up_proj_scale"]
    scales = exponents(weight, 8)
    codes = (weight / factors(scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(found["router.weight_scale"], scales.to(torch.uint8))
    assert torch.equal(found["router.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert found["up_proj_scale"].shape == (2, 6, 2)


@ranks(3)
@pytest.mark.parametrize("exponent_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_microscaled_codes_that_another_program_wrote_are_decoded_into_any_cut(exponent_dtype: torch.dtype) -> None:
    folder, source = shared_folder(), experts(1)
    codes, scales = in_mxfp4(source.up_proj)
    eight_bit_scales = exponents(source.router.weight, 8).to(torch.uint8)
    eight_bits = (source.router.weight.detach() / factors(eight_bit_scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {
        "up_proj_blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).unflatten(-1, (2, 16)),
        "up_proj_scales": scales.view(exponent_dtype),
        "router.weight": eight_bits,
        "router.weight_scale": eight_bit_scales.view(exponent_dtype),
        "router.bias": source.router.bias.detach(),
    }
    if dist.get_rank() == 0:
        safetensors.save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    by_sevens = fully_shard(experts(2), param_policy=lambda fqn, param: ParamPolicy(granularity=7))
    for model in (by_sevens, fsdp2(experts(2)), experts(2)):
        import_safetensors(model, folder)
        assert torch.equal(whole(model.up_proj), E2M1[codes.long()] * factors(scales))
        assert torch.equal(whole(model.router.weight), eight_bits.float() * factors(eight_bit_scales))


@ranks(2)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_what_was_imported_is_exported_bit_for_bit(name: str) -> None:
    folder, again = shared_folder(), shared_folder()
    export_safetensors(fully_shard(experts(1)), folder, param_policy=in_format(name))
    model = fully_shard(experts(2))
    import_safetensors(model, folder)
    export_safetensors(model, again, param_policy=in_format(name))
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


@ranks(2)
def test_codes_whose_scales_are_missing_are_named() -> None:
    folder, model = shared_folder(), fully_shard(experts(1))
    export_safetensors(model, folder, param_policy=in_format("mxfp4"))
    if dist.get_rank() == 0:
        tensors = safetensors.load_file(folder / "model.safetensors")
        del tensors["up_proj_scales"]
        safetensors.save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    before = whole(model.router.weight)
    with pytest.raises(CheckpointError, match="up_proj: no tensor up_proj in the files") as found:
        import_safetensors(model, folder)
    assert "up_proj_blocks: in the files, not in the model" in str(found.value)
    assert torch.equal(whole(model.router.weight), before)
