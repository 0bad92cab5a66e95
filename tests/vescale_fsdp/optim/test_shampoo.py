"""Shampoo on sharded parameters takes the steps of a naive one-process Shampoo, whatever the ranks and cuts."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import ranks
from sharding import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp.optim import Replicas, Shampoo

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(12, 10), (9, 7), (1, 8), (8, 1), (2, 6, 5)]
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "epsilon": 1e-6,
    "max_preconditioner_dim": 4,
    "precondition_frequency": 2,
    "weight_decay": 0.1,
}


def fulls(seed: int, shapes: Sequence[Shape] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def naive_shampoo(weight: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """OPTIONS' Shampoo of one parameter, block by block, with roots by singular values."""
    if weight.ndim == 3:
        return torch.stack([naive_shampoo(w, g) for w, g in zip(weight, zip(*grads, strict=True), strict=True)])
    rows, columns = weight.shape
    result = weight.clone()
    for top in range(0, rows, 4):
        for left in range(0, columns, 4):
            window = slice(top, top + 4), slice(left, left + 4)
            result[window] = naive_block(weight[window], [grad[window] for grad in grads])
    return result


def naive_block(weight: Tensor, grads: Sequence[Tensor]) -> Tensor:
    weight, mean = weight.clone(), torch.zeros_like(weight)
    factors, square, roots = [0.0, 0.0], torch.zeros_like(weight), [weight, weight]
    for step, grad in enumerate(grads, 1):
        unbias = 1 - 0.999**step
        factors = [0.999 * f + 0.001 * g for f, g in zip(factors, (grad @ grad.T, grad.T @ grad), strict=True)]
        square = 0.999 * square + 0.001 * grad * grad
        if step % 2:
            roots = [inverse_fourth_root(torch.as_tensor(factor) / unbias) for factor in factors]
        update = roots[0] @ grad @ roots[1]
        update = update * (grad / ((square / unbias).sqrt() + 1e-8)).norm() / update.norm()
        mean = 0.9 * mean + 0.1 * update
        weight = weight - 0.1 * 0.1 * weight - 0.1 * mean / (1 - 0.9**step)
    return weight


def inverse_fourth_root(factor: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    values = values - values.min().clamp(max=0) + 1e-6
    return vectors @ values.pow(-0.25).diag() @ vectors.T


def steps(optimizer: Shampoo, params: Sequence[Tensor], layouts: Sequence[Any], seeds: Sequence[int]) -> None:
    for seed in seeds:
        for param, layout, grad in zip(params, layouts, fulls(seed, [tuple(p.shape) for p in params]), strict=True):
            param.grad = shard(grad, *layout)
        optimizer.step()


@ranks(1, 2, 3, 4)
def test_six_steps_equal_a_naive_one_process_shampoo() -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    last = [int(rank == n - 1) for rank in range(n)]
    layouts: list[Any] = [
        (mesh, [RaggedShard((0,), (1, *last[1:]) if n > 1 else (1,))]),
        (mesh, [Shard(0)]),
        (mesh, [Shard(1)]),
        (mesh, [RaggedShard((0, 1), last)]),
        (mesh, [RaggedShard((0, 1), (1, *[0] * (n - 2), 2) if n > 1 else (1,))]),
    ]
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(fulls(99), layouts, strict=True)]
    steps(Shampoo(params, bucket_nbytes=8 * 60, **OPTIONS), params, layouts, range(6))
    for i, (param, layout) in enumerate(zip(params, layouts, strict=True)):
        expected = naive_shampoo(fulls(99)[i], [fulls(seed)[i] for seed in range(6)])
        torch.testing.assert_close(param.to_local(), shard(expected, *layout).to_local())  # type: ignore[attr-defined]


LAYOUTS_2D: list[tuple[Shape, list[Any]]] = [
    ((12, 10), [Replicate(), RaggedShard((0,), (1, 2))]),
    ((12, 10), [RaggedShard((0,), (1, 2)), Shard(1)]),
    ((12, 10), [StridedRaggedShard((0,), (1, 2), 2), Shard(0)]),
    ((12, 10), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((8, 1), [RaggedShard((0,), (3, 5)), Replicate()]),
    ((2, 6, 5), [RaggedShard((0,), (0, 1)), Shard(1)]),
    ((0, 3), [RaggedShard((0,), (0, 1)), Shard(1)]),
]


def check_naive(params: Sequence[Tensor], layouts: Sequence[Any], num_steps: int) -> None:
    shapes = [tuple(param.shape) for param in params]
    for i, (param, layout) in enumerate(zip(params, layouts, strict=True)):
        expected = naive_shampoo(fulls(99, shapes)[i], [fulls(seed, shapes)[i] for seed in range(num_steps)])
        torch.testing.assert_close(param.to_local(), shard(expected, *layout).to_local())  # type: ignore[attr-defined]


@ranks(4)
@pytest.mark.parametrize("replicas", list(Replicas))
def test_hsdp_and_tensor_parallel_layouts_take_the_same_steps(replicas: Replicas) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    shapes, placements = zip(*LAYOUTS_2D, strict=True)
    layouts = [(mesh, each) for each in placements]
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(fulls(99, shapes), layouts, strict=True)]
    steps(Shampoo(params, replicas=replicas, bucket_nbytes=8 * 60, **OPTIONS), params, layouts, range(4))
    check_naive(params, layouts, 4)


@ranks(4)
def test_the_state_of_a_tensor_parallel_parameter_lies_on_one_line_of_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    layout = (mesh, [RaggedShard((0,), (1, 2)), Shard(1)])
    params = [nn.Parameter(shard(fulls(99)[0], *layout)) for _ in range(2)]
    optimizer = Shampoo(params, **OPTIONS)
    steps(optimizer, params, [layout] * 2, range(2))
    squares = [optimizer.state[param]["square"] for param in params]
    assert [square.placements for square in squares] == [  # type: ignore[attr-defined]
        (RaggedShard((0,), (2, 1)), RaggedShard((0,), (1, 0))),
        (RaggedShard((0,), (2, 1)), RaggedShard((0,), (0, 1))),
    ]
    blocks = [fulls(seed)[0][:4, :4] for seed in range(2)]
    square = 0.001 * (0.999 * blocks[0] * blocks[0] + blocks[1] * blocks[1])
    torch.testing.assert_close(squares[0].full_tensor()[:16].view(4, 4), square)  # type: ignore[attr-defined]


@ranks(2)
def test_nothing_travels_where_shards_hold_whole_panels() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layout = (mesh, [RaggedShard((0,), (2, 1))])  # rows 0..8 and 8..12: panels of 4 rows
    param = nn.Parameter(shard(fulls(99)[0], *layout))
    with patch.object(dist, "all_to_all_single", side_effect=AssertionError):
        steps(Shampoo([param], **OPTIONS), [param], [layout], range(2))


@ranks(3)
def test_states_are_dtensors_of_the_owners_panels_in_memory_order() -> None:
    mesh = init_device_mesh("cpu", (3,))
    layout = (mesh, [RaggedShard((0,), (5, 2, 5))])
    param = nn.Parameter(shard(fulls(99)[0], *layout))
    optimizer = Shampoo([param], **OPTIONS)
    steps(optimizer, [param], [layout], range(2))
    state = optimizer.state[param]
    assert set(state) == {"step", "exp_avg", "factors", "roots", "square"}
    assert state["step"] == 2
    assert state["exp_avg"].placements == param.placements  # type: ignore[attr-defined]
    assert state["square"].shape == (120,)
    assert state["factors"].shape == (3 * (3 * 16 + 16 + 16 + 4),)
    grads = [fulls(seed)[0][:4, :4] for seed in range(2)]
    left = 0.001 * (0.999 * grads[0] @ grads[0].T + grads[1] @ grads[1].T)
    torch.testing.assert_close(state["factors"].full_tensor()[:16].view(4, 4), left)


@ranks(4)
def test_state_continues_on_another_cut_and_other_owners() -> None:
    saved = (init_device_mesh("cpu", (4,)), [RaggedShard((0,), (5, 1, 0, 6))])
    param = nn.Parameter(shard(fulls(99)[0], *saved))
    optimizer = Shampoo([param], **OPTIONS)
    steps(optimizer, [param], [saved], range(3))
    loaded = (init_device_mesh("cpu", (2, 2)), [Replicate(), RaggedShard((0,), (1, 2))])
    twin = nn.Parameter(shard(param.full_tensor().detach(), *loaded))  # type: ignore[attr-defined]
    other = Shampoo([twin], **OPTIONS)
    steps(other, [twin], [loaded], [0])
    twin.data.copy_(shard(param.full_tensor().detach(), *loaded))  # type: ignore[attr-defined]
    for name, state in other.state[twin].items():
        value = optimizer.state[param][name]
        if name == "step":
            state.copy_(value)
            continue
        state.copy_(shard(value.full_tensor(), state.device_mesh, state.placements))  # type: ignore[attr-defined]
    steps(other, [twin], [loaded], range(3, 5))
    expected = naive_shampoo(fulls(99)[0], [fulls(seed)[0] for seed in range(5)])
    torch.testing.assert_close(twin.to_local(), shard(expected, *loaded).to_local())  # type: ignore[attr-defined]


MOVES: dict[str, tuple[tuple[Shape, list[Any]], tuple[Shape, list[Any]]]] = {
    "to hybrid sharding": (
        ((4,), [RaggedShard((0,), (5, 1, 0, 6))]),
        ((2, 2), [Replicate(), RaggedShard((0,), (1, 2))]),
    ),
    "to tensor parallelism": (
        ((4,), [RaggedShard((0,), (5, 1, 0, 6))]),
        ((2, 2), [RaggedShard((0,), (1, 2)), Shard(1)]),
    ),
    "from tensor parallelism": (
        ((2, 2), [StridedRaggedShard((0,), (1, 2), 2), Shard(0)]),
        ((4,), [RaggedShard((0,), (5, 1, 0, 6))]),
    ),
}


@ranks(4)
@pytest.mark.parametrize("move", MOVES)
def test_a_checkpoint_continues_on_another_mesh_and_cut(move: str) -> None:
    saved, loaded = ((init_device_mesh("cpu", sizes), placements) for sizes, placements in MOVES[move])
    params = [nn.Parameter(shard(fulls(99)[0], *saved)) for _ in range(2)]
    optimizer = Shampoo(params, **OPTIONS)
    steps(optimizer, params, [saved] * 2, range(3))
    folder = broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")
    dcp.save({"w": params[1], **optimizer.state[params[1]]}, checkpoint_id=folder)

    twin = nn.Parameter(shard(torch.zeros(12, 10, dtype=torch.float64), *loaded))
    other = Shampoo([twin], **OPTIONS)
    steps(other, [twin], [loaded], [0])
    dcp.load({"w": twin, **other.state[twin]}, checkpoint_id=folder)
    steps(other, [twin], [loaded], range(3, 5))
    grads = [fulls(seed, [(12, 10)] * 2)[1] for seed in range(3)] + [fulls(seed)[0] for seed in range(3, 5)]
    torch.testing.assert_close(twin.to_local(), shard(naive_shampoo(fulls(99)[0], grads), *loaded).to_local())  # type: ignore[attr-defined]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@ranks(4)
def test_state_moves_when_parameters_that_are_added_give_it_other_owners() -> None:
    mesh = init_device_mesh("cpu", (4,))
    layouts: list[Any] = [(mesh, [Shard(0)]), (mesh, [RaggedShard((0,), (1, 0, 0, 0))])]
    params = [nn.Parameter(shard(fulls(99)[0], *layout)) for layout in layouts]
    optimizer = Shampoo(params[:1], **OPTIONS)
    steps(optimizer, params[:1], layouts[:1], range(2))
    before = optimizer.state[params[0]]["factors"].placements
    optimizer.add_param_group({"params": params[1:]})  # rank 0 has enough to do with it
    for seed in range(2, 4):
        for param, layout in zip(params, layouts, strict=True):
            param.grad = shard(fulls(seed)[0], *layout)
        optimizer.step()
    assert optimizer.state[params[0]]["factors"].placements != before
    expected = naive_shampoo(fulls(99)[0], [fulls(seed)[0] for seed in range(4)])
    torch.testing.assert_close(params[0].to_local(), shard(expected, *layouts[0]).to_local())  # type: ignore[attr-defined]


def broadcast(text: str) -> str:
    box = [text]
    dist.broadcast_object_list(box)
    return box[0]


def test_a_state_dict_keeps_factors_in_float32_under_bfloat16_parameters() -> None:
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Shampoo([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    other = Shampoo([nn.Parameter(param.detach().clone())])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (state,) = other.state.values()
    assert {name: state[name].dtype for name in ("factors", "roots", "square", "exp_avg")} == {
        "factors": torch.float32,
        "roots": torch.float32,
        "square": torch.float32,
        "exp_avg": torch.bfloat16,
    }


@ranks(3)
def test_missing_gradients_empty_shards_and_nothing_at_all() -> None:
    mesh = init_device_mesh("cpu", (3,))
    layouts = [(mesh, [RaggedShard((0,), (1, 0, 0))]), (mesh, [Shard(0)]), (mesh, [Shard(0)])]
    shapes: list[Shape] = [(3, 5), (4, 4), (0, 3)]
    params = [nn.Parameter(shard(w, *layout)) for w, layout in zip(fulls(1, shapes), layouts, strict=True)]
    optimizer = Shampoo(params, **OPTIONS)
    params[0].grad = shard(fulls(2, shapes)[0], *layouts[0])
    params[2].grad = shard(fulls(2, shapes)[2], *layouts[2])
    before = params[1].to_local().clone()  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(params[1].to_local(), before)  # type: ignore[attr-defined]
    assert not optimizer.state[params[1]]
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("max_preconditioner_dim: expected at least 1, got 0", {"max_preconditioner_dim": 0}),
        ("beta1: expected 0 <= beta1 < 1, got 1", {"beta1": 1.0}),
        ("lr: expected lr >= 0", {"lr": -1.0}),
    ],
)
def test_wrong_options_are_refused_by_name(message: str, options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Shampoo([nn.Parameter(torch.zeros(2, 2))], **options)
