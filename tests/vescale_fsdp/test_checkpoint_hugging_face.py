"""safetensors: what we write, the safetensors package reads, and the other way round; shards read their parts alone."""

from __future__ import annotations

import json
import tempfile
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


def in_fp8(fqn: str, param: torch.Tensor) -> ParamPolicy | None:
    return ParamPolicy(format="fp8_block") if param.ndim == 2 else None


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
    with pytest.raises(CheckpointError, match="mxfp4: has no file_dtype and scale_suffix"):
        export_safetensors(model, folder, param_policy=lambda fqn, param: ParamPolicy(format="mxfp4"))
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
