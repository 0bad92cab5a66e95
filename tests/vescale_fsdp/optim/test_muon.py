"""Muon on sharded parameters takes torch.optim.Muon's steps on the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mesh_models import Meshes
from ranks import ranks
from sharding import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import vescale_fsdp.optim.muon as muon_module
from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp import fully_shard
from vescale_fsdp.optim import Muon, Replicas, matrix_groups

Shape = tuple[int, ...]
STEPS = 10


def fulls(shapes: Sequence[Shape], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def ours(optimizer: Muon, params: Sequence[Tensor], layouts: Sequence[Any], steps: int = STEPS) -> None:
    for step in range(steps):
        for param, layout, grad in zip(params, layouts, fulls([p.shape for p in params], step), strict=True):
            param.grad = shard(grad, *layout)
        optimizer.step()


@contextmanager
def iterating_in(dtype: torch.dtype) -> Iterator[None]:
    """torch.optim.Muon casts to bfloat16 by name; the reference for another dtype casts there instead."""
    with patch.object(Tensor, "bfloat16", lambda self: self.to(dtype, copy=True)):
        yield


def reference(weights: Sequence[Tensor], dtype: torch.dtype, steps: int = STEPS, **options: Any) -> list[Tensor]:
    """torch.optim.Muon on the full tensors in one process."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = torch.optim.Muon(params, **options)
    with iterating_in(dtype):
        for step in range(steps):
            for param, grad in zip(params, fulls([p.shape for p in params], step), strict=True):
                param.grad = grad
            optimizer.step()
    return [param.detach() for param in params]


def check(params: Sequence[Tensor], expected: Sequence[Tensor], layouts: Sequence[Any], rtol: float) -> None:
    for param, full, layout in zip(params, expected, layouts, strict=True):
        local = param.to_local()  # type: ignore[attr-defined]
        torch.testing.assert_close(
            local, shard(full, *layout).to_local(), rtol=rtol, atol=rtol * float(full.abs().max())
        )


def even_and_ragged(n: int) -> list[tuple[Shape, list[Any]]]:
    units = [(7, 3, 0, 5)[rank] for rank in range(n)]
    return [
        ((16, 12), [Shard(0)]),
        ((sum(units), 12), [RaggedShard((0,), units)]),
        ((4 * sum(units), 9), [RaggedShard((0, 1), units)]),
        ((12, 16), [RaggedShard((0, 1), [int(r == n - 1) for r in range(n)])]),
        ((16, 12), [Shard(1)]),
        ((1, 9), [Shard(0)]),
        ((9, 1), [Shard(0)]),
    ]


LAYOUTS_2D: list[tuple[Shape, list[Any]]] = [
    ((16, 12), [Replicate(), RaggedShard((0, 1), (1, 2))]),
    ((16, 12), [Replicate(), Shard(0)]),
    ((16, 12), [RaggedShard((0,), (3, 5)), Shard(1)]),
    ((16, 12), [StridedRaggedShard((0,), (1, 3), 2), Shard(0)]),
    ((16, 12), [RaggedShard((0,), (3, 5)), Replicate()]),
]
EXACT_AND_TORCHS = [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("dtype", "rtol"), EXACT_AND_TORCHS)
def test_ten_steps_equal_torch_muon_on_the_full_gradients(dtype: torch.dtype, rtol: float) -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    shapes, placements = zip(*even_and_ragged(n), strict=True)
    layouts = [(mesh, placement) for placement in placements]
    weights = fulls(shapes, 99)
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(weights, layouts, strict=True)]
    ours(Muon(params, lr=0.02, iteration_dtype=dtype, bucket_nbytes=1000), params, layouts)
    check(params, reference(weights, dtype, lr=0.02), layouts, rtol)


@ranks(4)
@pytest.mark.parametrize("replicas", list(Replicas))
@pytest.mark.parametrize(("dtype", "rtol"), EXACT_AND_TORCHS)
def test_ten_steps_equal_torch_muon_under_hsdp_and_tensor_parallelism(
    dtype: torch.dtype, rtol: float, replicas: Replicas
) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    shapes, placements = zip(*LAYOUTS_2D, strict=True)
    layouts = [(mesh, placement) for placement in placements]
    weights = fulls(shapes, 99)
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(weights, layouts, strict=True)]
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    ours(Muon(params, iteration_dtype=dtype, replicas=replicas, **options), params, layouts)
    check(params, reference(weights, dtype, **options), layouts, rtol)


@ranks(1, 2, 4)
def test_every_matrix_is_orthogonalized_once_per_step_over_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts = [(mesh, [Shard(0)])] * 7
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(fulls([(8, 6)] * 7, 9), layouts, strict=True)]
    with counted_matrices() as counted:
        ours(Muon(params), params, layouts, steps=3)
    total = torch.tensor(counted[0])
    dist.all_reduce(total)
    assert total == 7 * 3


@ranks(4)
@pytest.mark.parametrize(("replicas", "times"), [(Replicas.REPEAT, 2), (Replicas.SHARE, 1)])
def test_replicas_orthogonalize_every_matrix_once_together_when_they_share(replicas: Replicas, times: int) -> None:
    layouts = [(init_device_mesh("cpu", (2, 2)), [Replicate(), RaggedShard((0,), (1, 3))])] * 5
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(fulls([(8, 6)] * 5, 9), layouts, strict=True)]
    with counted_matrices() as counted:
        ours(Muon(params, replicas=replicas), params, layouts, steps=2)
    total = torch.tensor(counted[0])
    dist.all_reduce(total)
    assert total == 5 * 2 * times


@contextmanager
def counted_matrices() -> Iterator[list[int]]:
    """How many matrices this rank orthogonalizes."""
    counted = [0]
    original = muon_module.orthogonalize_each

    def count(matrices: Sequence[Tensor], *args: Any) -> list[Tensor]:
        counted[0] += len(matrices)
        return original(matrices, *args)

    with patch.object(muon_module, "orthogonalize_each", count):
        yield counted


EXPERTS: list[list[Any]] = [
    [StridedRaggedShard((0,), (3, 1), 2), Shard(0)],  # expert by expert: three and one of each rank's four
    [StridedRaggedShard((0, 1), (5, 19), 2), Shard(0)],  # inside experts
    [RaggedShard((0,), (1, 3)), Shard(2)],  # tensor parallelism inside experts
]


@ranks(4)
def test_expert_stacks_on_their_own_mesh_take_torch_muons_steps_beside_dense_matrices() -> None:
    dense, experts = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_ep", "ep"))
    shapes: list[Shape] = [(16, 12), (8, 6, 4), (8, 6, 4), (8, 6, 4)]
    layouts = [(dense, [RaggedShard((0, 1), (7, 3, 0, 6))]), *((experts, placements) for placements in EXPERTS)]
    weights = fulls(shapes, 99)
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(weights, layouts, strict=True)]
    optimizer = Muon(params, lr=0.02, iteration_dtype=torch.float32)
    with counted_matrices() as counted:
        ours(optimizer, params, layouts, steps=3)
    assert [borrowed.lender.num_buckets for borrowed in optimizer.borrowed()] == [1, 1]
    assert collectives(optimizer) == 2 * (1 + 2)  # two each way along every axis of each mesh
    total = torch.tensor(counted[0])
    dist.all_reduce(total)
    assert total == (1 + 3 * 8) * 3
    check(params, reference_of_stacks(weights), layouts, 1e-6)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 16, bias=False)
        self.experts = nn.Module()
        self.experts.register_parameter("up", nn.Parameter(fulls([(4, 6, 5)], 99)[0]))


@ranks(4)
def test_experts_that_fully_shard_cut_on_their_own_mesh_take_torch_muons_steps_beside_dense_ones() -> None:
    meshes = Meshes.of(None, 2, 2, 1)
    module: Any = Mixture()
    with torch.no_grad():
        module.dense.weight.copy_(fulls([(16, 12)], 98)[0])
    weights = [param.detach().clone() for param in module.parameters()]
    module.experts.up = nn.Parameter(distribute_tensor(module.experts.up.detach(), meshes.ep, [Shard(0)]))
    fully_shard(module.experts, mesh=meshes.expert_data)
    fully_shard(module, mesh=meshes.data)
    params = list(module.parameters())
    layouts = [(param.device_mesh, param.placements) for param in params]
    optimizer = Muon(module.named_parameters(), lr=0.02, iteration_dtype=torch.float32)
    ours(optimizer, params, layouts, steps=3)
    assert len(optimizer.borrowed()) == 2
    check(params, reference_of_stacks(weights, seeds=(0, 1, 2)), layouts, 1e-6)


def reference_of_stacks(weights: Sequence[Tensor], seeds: Sequence[int] = (0, 1, 2, 2)) -> list[Tensor]:
    """torch.optim.Muon on each expert as a matrix of its own; the last seed twice: collectives are counted, too."""
    pieces = [weight.unbind() if weight.ndim == 3 else (weight,) for weight in weights]
    params = [[nn.Parameter(piece.clone()) for piece in each] for each in pieces]
    optimizer = torch.optim.Muon([param for each in params for param in each], lr=0.02)
    with iterating_in(torch.float32):
        for step in seeds:
            for each, grad in zip(params, fulls([w.shape for w in weights], step), strict=True):
                for param, piece in zip(each, grad.unbind() if grad.ndim == 3 else (grad,), strict=True):
                    param.grad = piece
            optimizer.step()
    return [torch.stack([p.detach() for p in each]) if len(each) > 1 else each[0].detach() for each in params]


def collectives(optimizer: torch.optim.Optimizer) -> int:
    calls = 0
    original = dist.all_to_all_single

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with patch.object(dist, "all_to_all_single", count), CommDebugMode() as debug:
        optimizer.step()
    functional = sum(n for op, n in debug.get_comm_counts().items() if "alltoall" not in str(op))
    return calls + functional


@ranks(4)
def test_two_collectives_a_step_where_torch_muon_takes_eleven_per_matrix() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for num_matrices, ns_steps in [(2, 5), (6, 5), (6, 9)]:
        weights = fulls([(16, 12)] * num_matrices, 9)
        pairs = [[nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in weights] for _ in range(2)]
        for params in pairs:
            for param in params:
                param.grad = torch.ones_like(param)
        assert collectives(Muon(pairs[0], ns_steps=ns_steps)) == 2
        assert collectives(torch.optim.Muon(pairs[1], ns_steps=ns_steps)) == num_matrices * (2 * ns_steps + 1)


@ranks(1, 3)
def test_stacks_convolutions_and_fused_rows_are_orthogonalized_matrix_by_matrix() -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    shapes: list[Shape] = [(16, 6), (3, 4, 6), (8, 3, 3, 3), (8, 3, 5), (2, 8, 6)]
    names = ["qkv", "experts", "conv", "conv1d", "gate_up"]
    units = [(7, 3, 14)[rank] for rank in range(n)]
    layouts = [(mesh, [RaggedShard(tuple(range(len(shape))), units)]) for shape in shapes]
    weights = fulls(shapes, 9)
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(weights, layouts, strict=True)]
    optimizer = Muon(
        list(zip(names, params, strict=True)),
        split={"qkv": (8, 4, 4), "gate_up": (4, 4)},
        flatten=["conv1d"],
        iteration_dtype=torch.float32,
    )
    ours(optimizer, params, layouts, steps=1)
    (grad,) = [fulls(shapes, 0)]
    expected = [
        torch.cat([step(w, g) for w, g in zip(weights[0].split([8, 4, 4]), grad[0].split([8, 4, 4]), strict=True)]),
        torch.stack([step(w, g) for w, g in zip(weights[1], grad[1], strict=True)]),
        step(weights[2].flatten(1), grad[2].flatten(1)).view(8, 3, 3, 3),
        step(weights[3].flatten(1), grad[3].flatten(1)).view(8, 3, 5),
        torch.stack(
            [
                torch.cat([step(w, g) for w, g in zip(ws.split(4), gs.split(4), strict=True)])
                for ws, gs in zip(weights[4], grad[4], strict=True)
            ]
        ),
    ]
    check(params, expected, layouts, 1e-6)


def step(weight: Tensor, grad: Tensor) -> Tensor:
    param = nn.Parameter(weight.clone())
    param.grad = grad.clone()
    with iterating_in(torch.float32):
        torch.optim.Muon([param]).step()
    return param.detach()


@ranks(2)
def test_the_adamw_partner_takes_torch_adamws_steps() -> None:
    mesh = init_device_mesh("cpu", (2,))
    (weight, bias, embedding) = fulls([(8, 6), (9,), (10, 4)], 5)
    layout = (mesh, [RaggedShard((0,), (1, 2))])
    params = [nn.Parameter(shard(weight, mesh, [Shard(0)])), nn.Parameter(shard(bias, *layout))]
    embedding_param = nn.Parameter(embedding.clone())
    optimizer = Muon(
        [{"params": params[:1]}, {"params": [params[1], embedding_param], "algorithm": "adamw", "lr": 0.3, "eps": 1e-5}]
    )
    alone = [nn.Parameter(bias.clone()), nn.Parameter(embedding.clone())]
    adamw = torch.optim.AdamW(alone, lr=0.3, eps=1e-5)
    for i in range(3):
        (grad_w, grad_b, grad_e) = fulls([(8, 6), (9,), (10, 4)], i)
        params[0].grad = shard(grad_w, mesh, [Shard(0)])
        params[1].grad, alone[0].grad = shard(grad_b, *layout), grad_b
        embedding_param.grad, alone[1].grad = grad_e.clone(), grad_e
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(params[1].to_local(), shard(alone[0].detach(), *layout).to_local())  # type: ignore[attr-defined]
    torch.testing.assert_close(embedding_param, alone[1])


@ranks(2)
def test_state_has_the_parameters_placements_and_survives_a_state_dict() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layouts = [(mesh, [RaggedShard((0, 1), (1, 3))]), (mesh, [RaggedShard((0,), (3, 1))])]
    weights = fulls([(8, 6), (12, 5)], 5)
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(weights, layouts, strict=True)]
    optimizer = Muon(params)
    ours(optimizer, params, layouts, steps=3)
    for param in params:
        momentum = optimizer.state[param]["momentum_buffer"]
        assert momentum.placements == param.placements  # type: ignore[attr-defined]
        assert momentum.shape == param.shape
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    twin = Muon(twins)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours(optimizer, params, layouts, steps=2)
    ours(twin, twins, layouts, steps=2)
    for param, other in zip(params, twins, strict=True):
        assert torch.equal(param.to_local(), other.to_local())  # type: ignore[attr-defined]


@ranks(1, 2)
def test_parameters_without_a_gradient_are_left_alone_and_get_no_state() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = (mesh, [Shard(0)])
    params = [nn.Parameter(shard(w, *layout)) for w in fulls([(8, 6)] * 3, 5)]
    params[1].requires_grad_(False)
    before = [param.to_local().clone() for param in params]  # type: ignore[attr-defined]
    optimizer = Muon(params)
    params[0].grad = shard(torch.ones(8, 6), *layout)
    optimizer.step()
    assert not torch.equal(params[0].to_local(), before[0])  # type: ignore[attr-defined]
    for index in (1, 2):
        assert torch.equal(params[index].to_local(), before[index])  # type: ignore[attr-defined]
        assert not optimizer.state[params[index]]


@ranks(2)
def test_a_gradient_missing_on_one_rank_raises_on_all_and_moves_no_parameter() -> None:
    layout = (init_device_mesh("cpu", (2,)), [Shard(0)])
    params = [nn.Parameter(shard(w, *layout)) for w in fulls([(8, 6)] * 2, 5)]
    before = [param.to_local().clone() for param in params]  # type: ignore[attr-defined]
    params[0].grad = shard(torch.ones(8, 6), *layout)
    if dist.get_rank() == 0:
        params[1].grad = shard(torch.ones(8, 6), *layout)
    with pytest.raises(ValueError, match=r"w1: some ranks have a gradient .* others have none"):
        Muon([("w0", params[0]), ("w1", params[1])]).step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.to_local(), old)  # type: ignore[attr-defined]


@ranks(4)
def test_empty_shards_and_parameters_without_elements() -> None:
    mesh = init_device_mesh("cpu", (4,))
    layouts = [(mesh, [Shard(0)]), (mesh, [RaggedShard((0,), (1, 0, 0, 0))]), (mesh, [Shard(0)])]
    weights = fulls([(1, 8), (3, 3), (0, 5)], 5)
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(weights, layouts, strict=True)]
    ours(Muon(params, iteration_dtype=torch.float32), params, layouts, steps=2)
    check(params[:2], reference(weights[:2], torch.float32, steps=2), layouts[:2], 1e-6)


@ranks(2)
def test_accumulated_gradients_advance_momentum_once() -> None:
    layout = (init_device_mesh("cpu", (2,)), [Shard(0)])
    param = nn.Parameter(shard(torch.zeros(4, 4), *layout))
    optimizer = Muon([param], momentum=0.75)
    for _ in range(3):
        (param * 2).sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"].full_tensor(), torch.full((4, 4), 0.25 * 6))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_matrix_groups_give_adamw_embeddings_what_is_tied_to_them_and_vectors() -> None:
    matrices, others = matrix_groups(Small(), lr=0.5)
    assert [fqn for fqn, _ in matrices["params"]] == ["hidden.weight"]
    assert [fqn for fqn, _ in others["params"]] == ["embed.weight", "hidden.bias"]
    assert (others["algorithm"], others["lr"]) == ("adamw", 0.5)


def test_a_group_of_adamw_has_adamws_defaults_not_muons() -> None:
    optimizer = Muon(matrix_groups(Small()), lr=0.02, weight_decay=0.5)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.5), (1e-3, 1e-2)]


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("w: split or flatten names no parameter", {"split": {"w": (1, 1)}}),
        ("lr: expected lr >= 0, got -1", {"lr": -1}),
        ("ns_coefficients", {"ns_coefficients": (1.0,)}),
        ("adjust_lr_fn", {"adjust_lr_fn": "best"}),
        ("momentum: expected momentum >= 0", {"momentum": -0.1}),
    ],
)
def test_wrong_options_are_refused_by_name(message: str, options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.zeros(2, 2))], **options)


def test_vectors_belong_to_adamw_and_unknown_algorithms_nowhere() -> None:
    with pytest.raises(ValueError, match=r"b: expected at least 2 dimensions.*adamw"):
        Muon([("b", nn.Parameter(torch.zeros(2)))])
    with pytest.raises(ValueError, match='expected "muon" or "adamw", got \'sgd\''):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "sgd"}])


@ranks(2)
def test_a_gradient_cut_otherwise_than_its_parameter_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(shard(torch.zeros(4, 4), mesh, [RaggedShard((0,), (1, 3))]))
    optimizer = Muon([("w", param)])
    param.grad = shard(torch.zeros(4, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="w: expected a gradient with the parameter's placements"):
        optimizer.step()


@ranks(2)
def test_a_gradient_cut_otherwise_on_one_rank_raises_on_all_and_moves_no_parameter() -> None:
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(shard(w, mesh, [RaggedShard((0,), (1, 3))])) for w in fulls([(4, 4)] * 2, 5)]
    before = [param.to_local().clone() for param in params]  # type: ignore[attr-defined]
    for index, param in enumerate(params):
        cut: Any = Shard(0) if index == dist.get_rank() == 1 else RaggedShard((0,), (1, 3))
        param.grad = shard(torch.ones(4, 4), mesh, [cut])
    wanted = "w1: expected a gradient with" if dist.get_rank() == 1 else "Another rank failed"
    with pytest.raises(ValueError, match=wanted):
        Muon([("w0", params[0]), ("w1", params[1])]).step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.to_local(), old)  # type: ignore[attr-defined]


@ranks(2)
def test_state_of_another_cut_is_cut_anew_and_continues() -> None:
    mesh = init_device_mesh("cpu", (2,))
    cuts: list[Any] = [(mesh, [RaggedShard((0,), (1, 3))]), (mesh, [RaggedShard((0, 1), (5, 7))])]
    (weight,) = fulls([(12, 6)], 99)
    param = nn.Parameter(shard(weight, *cuts[0]))
    optimizer = Muon([param], lr=0.02, iteration_dtype=torch.float32)
    ours(optimizer, [param], cuts[:1], steps=2)
    twin = nn.Parameter(shard(param.full_tensor().detach(), *cuts[1]))  # type: ignore[attr-defined]
    other = Muon([twin], lr=0.02, iteration_dtype=torch.float32)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours(optimizer, [param], cuts[:1], steps=2)
    ours(other, [twin], cuts[1:], steps=2)
    torch.testing.assert_close(twin.full_tensor(), param.full_tensor(), rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]
    other.state[twin]["momentum_buffer"] = torch.zeros(12, 6)
    with pytest.raises(ValueError, match=r"params\[0\]: its state momentum_buffer is not on its mesh"):
        ours(other, [twin], cuts[1:], steps=1)


def plain(num: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(weight.to(dtype)) for weight in fulls([(6, 4)] * num, 5)]


def give_gradients(params: Sequence[Tensor], seed: int, dtype: torch.dtype | None = None) -> None:
    for param, grad in zip(params, fulls([p.shape for p in params], seed), strict=True):
        param.grad = grad.to(dtype or param.dtype)


def test_dtypes_side_by_side_take_the_steps_that_each_takes_alone() -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    together = [plain(1, dtype)[0] for dtype in dtypes]
    alone = [plain(1, dtype)[0] for dtype in dtypes]
    optimizers = [Muon(together), *(Muon([param]) for param in alone)]
    for seed in range(2):
        give_gradients([*together, *alone], seed)
        for param, other in zip(alone, together, strict=True):
            assert other.grad is not None
            param.grad = other.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for param, other in zip(alone, together, strict=True):
        torch.testing.assert_close(param, other, rtol=5e-3, atol=5e-3)


def test_float32_momentum_of_a_bfloat16_parameter_survives_a_state_dict() -> None:
    (param,), (twin,) = plain(1, torch.bfloat16), plain(1, torch.bfloat16)
    param.grad_dtype = torch.float32
    optimizer, other = Muon([param]), Muon([twin])
    give_gradients([param], 0, torch.float32)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.state[twin]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(other.state[twin]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])
    assert other.state[twin]["momentum_buffer"] is not optimizer.state[param]["momentum_buffer"]


def test_a_gradient_that_is_not_contiguous_counts_as_its_contiguous_copy() -> None:
    (param,), (twin,) = plain(1), plain(1)
    (grad,) = fulls([(4, 6)], 1)
    param.grad, twin.grad = grad.T, grad.T.contiguous()
    Muon([param]).step()
    Muon([twin]).step()
    assert torch.equal(param, twin)


def test_a_parameter_that_is_not_contiguous_is_refused_before_anything_changes() -> None:
    params = [*plain(1), nn.Parameter(torch.zeros(4, 6).T)]
    give_gradients(params, 0)
    before = params[0].detach().clone()
    optimizer = Muon([("a", params[0]), ("b", params[1])])
    with pytest.raises(ValueError, match="b: expected contiguous local memory"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert not optimizer.state


def test_options_changed_between_steps_count_from_the_next_step() -> None:
    params, twins = plain(2), plain(2)
    changed, fresh = Muon(params, lr=0.5), Muon(twins, lr=0.02, momentum=0.5, iteration_dtype=torch.float32)
    changed.param_groups[0].update(lr=0.02, momentum=0.5, iteration_dtype=torch.float32)
    for optimizer, group in ((changed, params), (fresh, twins)):
        give_gradients(group, 0)
        optimizer.step()
    assert all(map(torch.equal, params, twins))


def test_a_group_that_turns_to_adamw_starts_adamws_state() -> None:
    params, twins = plain(1), plain(1)
    optimizer, adamw = Muon(params, lr=0.0), torch.optim.AdamW(twins, lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0].update(algorithm="adamw", lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    give_gradients(params, 1)
    give_gradients(twins, 1)
    optimizer.step()
    adamw.step()
    torch.testing.assert_close(params[0], twins[0])


def test_frozen_parameters_rest_and_go_on_with_their_momentum() -> None:
    params, twins = plain(2), plain(2)
    optimizer, other = Muon(params, iteration_dtype=torch.float32), Muon(twins, iteration_dtype=torch.float32)
    for seed, is_frozen in ((0, False), (1, True), (2, False)):
        params[1].requires_grad_(not is_frozen)
        give_gradients(params, seed)
        give_gradients(twins, seed)
        if is_frozen:
            params[1].grad = twins[1].grad = None
        optimizer.step()
        other.step()
    assert all(map(torch.equal, params, twins))
    momentum = 0.05 * fulls([(6, 4)] * 2, 0)[1]
    momentum = 0.95 * momentum + 0.05 * fulls([(6, 4)] * 2, 2)[1]
    torch.testing.assert_close(optimizer.state[params[1]]["momentum_buffer"], momentum)


def test_two_optimizers_on_one_model_take_the_steps_of_one_with_both_groups() -> None:
    params, twins = plain(2), plain(2)
    two = Muon(params[:1]), Muon(params[1:], lr=0.5)
    one = Muon([{"params": twins[:1]}, {"params": twins[1:], "lr": 0.5}])
    for seed in range(3):
        give_gradients(params, seed)
        give_gradients(twins, seed)
        for optimizer in (*two, one):
            optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=5e-3, atol=5e-3)


def test_parameters_appended_past_their_names_are_refused() -> None:
    optimizer = Muon([("w", plain(1)[0])])
    optimizer.param_groups[0]["params"] += plain(1)
    with pytest.raises(ValueError, match=r"param_groups\[0\]: expected a name for each of 2 parameters, got 1"):
        optimizer.step()
