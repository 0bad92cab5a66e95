"""Matrix optimizers on models that fully_shard wrapped: the same training as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import AdamW8bit, Muon, Replicas, Shampoo, matrix_groups, whole_matrices


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 20)
        self.out = nn.Linear(20, 12, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 12, 7) / 4)
        self.unused = nn.Linear(5, 5)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x + self.out(self.qkv(x).tanh()))
        return x + sum(((x @ expert).tanh() @ expert.T for expert in self.experts), torch.zeros_like(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def muon(module: nn.Module, **options: Any) -> Muon:
    split = {f"{i}.qkv.weight": (10, 5, 5) for i in range(2)}
    return Muon(matrix_groups(module, lr=1e-2), lr=0.02, split=split, iteration_dtype=torch.float32, **options)


def shampoo(module: nn.Module) -> Shampoo:
    return Shampoo(matrix_groups(module, lr=1e-2), lr=0.02, epsilon=1e-3, max_preconditioner_dim=6)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, share: slice, micro_batches: int = 1) -> None:
    for step in range(3):
        batch = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))[share]
        for part in batch.chunk(micro_batches):
            (module(part).square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()


def share() -> slice:
    size = 8 // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def check(module: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    whole = model()
    train(whole, make(whole), slice(None))
    for (fqn, param), expected in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(param, DTensor)
        torch.testing.assert_close(
            param.full_tensor(), expected.data, rtol=1e-4, atol=1e-5, msg=lambda text, fqn=fqn: f"{fqn}: {text}"
        )


@ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_training_equals_one_process(name: str) -> None:
    make: Callable[[nn.Module], torch.optim.Optimizer] = {"muon": muon, "shampoo": shampoo}[name]
    module = model()
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    train(module, make(module), share())
    check(module, make)


@ranks(4)
@pytest.mark.parametrize("replicas", list(Replicas))
def test_hybrid_sharding_equals_one_process(replicas: Replicas) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    module = model()
    for layer in module:
        fully_shard(layer, mesh=mesh)
    train(module, muon(module, replicas=replicas), share())
    check(module, muon)


@ranks(2)
def test_torchs_fully_shard_works_as_well() -> None:
    module = model()
    for layer in module:
        fsdp2(layer)
    train(module, muon(module), share())
    check(module, muon)


@ranks(2)
def test_accumulation_over_micro_batches_is_one_step() -> None:
    module = model()
    for layer in module:
        fully_shard(layer)
    train(module, muon(module), share(), micro_batches=2)
    check(module, muon)


@ranks(2)
@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_state_dicts_of_torchs_checkpoint_api_continue_training(name: str) -> None:
    make: Callable[[nn.Module], torch.optim.Optimizer] = {
        "muon": muon,
        "shampoo": shampoo,
        "adamw8bit": lambda module: AdamW8bit(module.parameters(), lr=0.02),
    }[name]
    modules = [model(), model()]
    for module in modules:
        for layer in module:
            layer.unused.requires_grad_(False)  # torch's API asks for state of all that could have some
            fully_shard(layer)
    optimizers = [make(module) for module in modules]
    train(modules[0], optimizers[0], share())
    modules[1].load_state_dict(modules[0].state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(modules[0], optimizers[0]))
    set_optimizer_state_dict(modules[1], optimizers[1], state)
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer, share())
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one.to_local(), other.to_local())  # type: ignore[attr-defined]


def towers_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "muon":
        return Muon(matrix_groups(module, lr=1e-2), lr=0.02, iteration_dtype=torch.float64)
    return Shampoo(matrix_groups(module, lr=1e-2), lr=0.02, epsilon=1e-3, max_preconditioner_dim=4)


@ranks(4)
@pytest.mark.parametrize("hidden", [16, 5])
@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_tensor_parallel_training_equals_one_process(name: str, hidden: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Tower(hidden=hidden).double()
    module = copy.deepcopy(whole)
    for block in module.blocks:
        parallelize_module(
            block, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        )
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    for each, rank in ((module, mesh["dp"].get_local_rank()), (whole, None)):
        optimizer = towers_optimizer(name, each)
        for step in range(3):
            (each(batch(step, 2, rank).double()) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (fqn, param), expected in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(param, DTensor)
        torch.testing.assert_close(
            param.full_tensor(), expected.data, rtol=1e-6, atol=1e-7, msg=lambda text, fqn=fqn: f"{fqn}: {text}"
        )


@ranks(2)
def test_matrices_that_the_planner_kept_whole_do_not_travel() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    fully_shard(module, param_policy=whole_matrices(module, num_ranks=2))
    optimizer = Muon(module.parameters())
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    with patch.object(dist, "all_to_all_single", side_effect=AssertionError):
        optimizer.step()
    assert "4 matrices of 4 tensors over 2 ranks: 4 lie whole at their owner" in optimizer.explain()


def test_as_many_matrices_are_whole_as_the_padding_allows() -> None:
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 100)])
    policy = whole_matrices(module, num_ranks=4, max_padding_pct=1.0)
    granted = [fqn for fqn, param in module.named_parameters() if policy(fqn, param) is not None]
    assert granted == ["0.weight", "1.weight"]


def test_without_a_bound_all_matrices_are_whole_and_with_none_to_spare_only_what_is_free() -> None:
    module = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
    for bound, count in ((1e6, 3), (0.0, 0)):
        policy = whole_matrices(module, num_ranks=2, max_padding_pct=bound)
        assert sum(policy(fqn, param) is not None for fqn, param in module.named_parameters()) >= count


@ranks(4)
@pytest.mark.parametrize("name", ["muon", "shampoo", "adamw8bit"])
def test_a_full_state_dict_continues_training_on_another_mesh(name: str) -> None:
    make: Callable[[nn.Module], torch.optim.Optimizer] = {
        "muon": muon,
        "shampoo": shampoo,
        "adamw8bit": lambda module: AdamW8bit(module.parameters(), lr=0.02),
    }[name]
    modules = [model(), model()]
    sizes: list[tuple[int, ...]] = [(4,), (2, 2)]
    for module, mesh_sizes in zip(modules, sizes, strict=True):
        for layer in module:
            layer.unused.requires_grad_(False)
            names = ("dp_replicate", "dp_shard")[-len(mesh_sizes) :]
            fully_shard(layer, mesh=init_device_mesh("cpu", mesh_sizes, mesh_dim_names=names))
    optimizers = [make(module) for module in modules]
    train(modules[0], optimizers[0], share())
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(modules[1], get_model_state_dict(modules[0], options=whole), options=whole)
    state = get_optimizer_state_dict(modules[0], optimizers[0], options=whole)
    set_optimizer_state_dict(modules[1], optimizers[1], state, options=whole)
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer, share())
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
