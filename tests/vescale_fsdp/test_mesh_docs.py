"""docs/meshes.md tells the truth: each of its blocks runs on as many ranks as it says."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ragged_dtensor
import vescale_fsdp

PAGE = (Path(__file__).parents[2] / "docs" / "meshes.md").read_text()
BLOCK = re.compile(r"<!-- (\d) ranks -->\n```python\n(.*?)```", re.DOTALL)
BLOCKS = [(int(num_ranks), code) for num_ranks, code in BLOCK.findall(PAGE)]


def run(num_ranks: int, index: int) -> None:
    code = [code for number, code in BLOCKS if number == num_ranks][index]
    names: dict[str, Any] = {
        **{name: getattr(vescale_fsdp, name) for name in vescale_fsdp.__all__},
        **{name: getattr(ragged_dtensor, name) for name in ("RaggedShard", "StridedRaggedShard")},
        **{"torch": torch, "dist": dist, "nn": nn, "DTensor": DTensor, "Replicate": Replicate, "Shard": Shard},
        **{"OrderedDict": OrderedDict, "init_device_mesh": init_device_mesh, "distribute_tensor": distribute_tensor},
        **{"ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel},
        **{"parallelize_module": parallelize_module, "FSDPMeshInfo": FSDPMeshInfo},
        "ShardPlacementResult": ShardPlacementResult,
    }
    exec(code, names)


def test_every_block_of_code_has_a_number_of_ranks() -> None:
    assert PAGE.count("```python") == len(BLOCKS) >= 9
    assert {num_ranks for num_ranks, _ in BLOCKS} == {4, 8}


@pytest.mark.parametrize("index", range(sum(num_ranks == 4 for num_ranks, _ in BLOCKS)))
@ranks(4)
def test_blocks_for_four_ranks_run(index: int) -> None:
    run(4, index)


@pytest.mark.parametrize("index", range(sum(num_ranks == 8 for num_ranks, _ in BLOCKS)))
@ranks(8)
def test_blocks_for_eight_ranks_run(index: int) -> None:
    run(8, index)
