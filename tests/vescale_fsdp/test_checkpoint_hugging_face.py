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

from vescale_fsdp import CheckpointError, export_safetensors, fully_shard, import_safetensors

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
    assert "head.weight" not in index["weight_map"]
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
