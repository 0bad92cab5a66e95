"""Checkpoints through torch's own calls: what one world size, engine or cut wrote, any other reads, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool, ranks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import ParamPolicy, fully_shard
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo, matrix_groups

WORLDS = [1, 2, 3, 4]
Optimizer = torch.optim.Optimizer


class Small(nn.Module):
    """Rows that few world sizes divide, a scalar, one element, a matrix of several 32-row blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((1,), 0.25))
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 1)
        self.table = nn.Parameter(torch.randn(70, 66))
        self.register_buffer("count", torch.tensor(3))


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def adamw8bit(model: nn.Module) -> Optimizer:
    return AdamW8bit(model.named_parameters(), lr=0.1)


def muon(model: nn.Module) -> Optimizer:
    return Muon(matrix_groups(model, lr=0.1), lr=0.02, iteration_dtype=torch.float32)


def shampoo(model: nn.Module) -> Optimizer:
    return Shampoo(matrix_groups(model, lr=0.1), lr=0.02, epsilon=1e-3, max_preconditioner_dim=32)


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "adamw8bit": adamw8bit,
    "muon": muon,
    "shampoo": shampoo,
}


def ours(seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Small()
    options.setdefault("param_policy", AdamW8bit.policy)
    fully_shard(model.a, **options)
    return fully_shard(model, **options)


def without_scalar(seed: int) -> nn.Module:
    """torch's fully_shard refuses scalars."""
    torch.manual_seed(seed)
    model = Small()
    model.scale = nn.Parameter(torch.full((1,), 1.5))
    return model


def by_fsdp2(seed: int) -> nn.Module:
    model = without_scalar(seed)
    fsdp2(model.a)
    return fsdp2(model)


def in_rows(seed: int) -> nn.Module:
    return fully_shard(without_scalar(seed), param_policy=lambda fqn, param: ParamPolicy(granularity="rows:7"))


def in_one_lane(seed: int) -> nn.Module:
    return fully_shard(without_scalar(seed), max_lanes=1)


ENGINES: dict[str, Callable[..., nn.Module]] = {
    "ours": ours,
    "rows": in_rows,
    "one lane": in_one_lane,
    "fsdp2": by_fsdp2,
    "single": without_scalar,
}


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """A step whose gradients are functions of the parameters, the same at every world size."""
    for parameter in model.parameters():
        parameter.grad = (parameter * 3).sin().detach()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of nested dicts by its path; DTensors whole."""
    if isinstance(state, dict):
        return {key: value for name, each in state.items() for key, value in flat(each, f"{prefix}/{name}").items()}
    return {prefix: state.full_tensor() if isinstance(state, DTensor) else state}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def write(root: str, optimizer: str, engine: str = "ours") -> None:
    """Two steps, the DCP checkpoint, and beside it every value whole."""
    model = ENGINES[engine](1)
    opt = MAKERS[optimizer](model)
    for _ in range(2):
        step(model, opt)
    state = state_of(model, opt)
    dcp.save(state, checkpoint_id=f"{root}/{dist.get_world_size()}")
    whole = flat(state)
    if dist.get_rank() == 0:
        torch.save(whole, f"{root}/{dist.get_world_size()}.whole")


def read(root: str, optimizer: str, engine: str = "ours", writers: list[int] = WORLDS) -> None:
    """A fresh model and optimizer hold, after loading, what each writer had."""
    for writer in writers:
        model = ENGINES[engine](2)
        opt = MAKERS[optimizer](model)
        state = state_of(model, opt)
        dcp.load(state, checkpoint_id=f"{root}/{writer}")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, opt, state["optimizer"])
        expected = torch.load(f"{root}/{writer}.whole", weights_only=False)
        assert_equal(flat(state_of(model, opt)), expected)
        step(model, opt)


@pytest.mark.parametrize("optimizer", list(MAKERS))
def test_every_world_size_reads_what_every_other_wrote(rank_pool: RankPool, tmp_path: Path, optimizer: str) -> None:
    """A20: every (A, B) in {1, 2, 3, 4} squared, parameters and optimizer state, bit by bit."""
    arguments = {"root": str(tmp_path), "optimizer": optimizer}
    for world in WORLDS:
        rank_pool.run(world, __file__, "write", arguments)
    for world in WORLDS:
        rank_pool.run(world, __file__, "read", arguments)


@pytest.mark.parametrize(
    ("writer", "reader"), [("rows", "fsdp2"), ("fsdp2", "rows"), ("rows", "single"), ("single", "one lane")]
)
def test_every_engine_and_cut_reads_what_another_wrote(
    rank_pool: RankPool, tmp_path: Path, writer: str, reader: str
) -> None:
    """A21: torch's fully_shard, one process, and cuts by rows and in one lane."""
    arguments = {"root": str(tmp_path), "optimizer": "adamw"}
    rank_pool.run(3, __file__, "write", {**arguments, "engine": writer})
    rank_pool.run(2, __file__, "read", {**arguments, "engine": reader, "writers": [3]})


@ranks(2)
def test_planning_and_writing_communicate_nothing_and_shapes_are_the_parameters() -> None:
    """A20, A21: shapes in the metadata, no collective while writing."""
    model = ours(1)
    opt = adamw(model)
    step(model, opt)
    state = state_of(model, opt)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, dist.get_rank() == 0)
    with CommDebugMode() as comms:
        plan = planner.create_local_plan()
        for item in plan.items:
            planner.resolve_data(item)
    assert comms.get_total_counts() == 0
    shapes = dict(Small().named_parameters())
    sizes = {item.index.fqn: item.tensor_data.size for item in plan.items if item.tensor_data is not None}
    for fqn, size in sizes.items():
        if fqn.startswith("model.") and fqn != "model.count":
            assert size == shapes[fqn.removeprefix("model.")].shape, fqn


@ranks(2)
def test_an_asynchronous_save_holds_the_values_of_the_call() -> None:
    """A52: staged from the group's buffer."""
    root: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(root)
    model = ours(1)
    expected = flat(get_model_state_dict(model))
    future: Any = dcp.async_save(get_model_state_dict(model), checkpoint_id=root[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    future.result()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=root[0])
    assert_equal(flat(state), expected)
