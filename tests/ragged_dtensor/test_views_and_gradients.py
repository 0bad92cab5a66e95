"""Views that keep the order of memory, refusals of the rest, and gradients through ops on ragged tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ragged_oracle import held
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import RaggedShard, RaggedShardError, UnsupportedOpError, distribute_tensor

ROWS = RaggedShard((0,), (1, 2))
FLAT = RaggedShard((0, 1), (5, 7))
OWNER = RaggedShard((0, 1), (0, 1))


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def place(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(full.detach().clone(), mesh, placements, src_data_rank=None)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(result, DTensor)
    mesh, coordinate = result.device_mesh, result.device_mesh.get_coordinate()
    assert coordinate is not None
    assert result.shape == expected.shape
    torch.testing.assert_close(result.to_local(), held(expected, result.placements, tuple(mesh.shape), coordinate))


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.view(-1),
    lambda t: t.flatten(),
    lambda t: t.reshape(4, 6),
    lambda t: t.view(2, 3, 4),
    lambda t: t.view(t.shape),
    lambda t: t.view(-1).view(t.shape),
    lambda t: t.unsqueeze(0),
    lambda t: t.unsqueeze(1),
    lambda t: t.unsqueeze(-1).squeeze(-1),
    lambda t: t[None],
    lambda t: t[:],
    lambda t: t.detach(),
    lambda t: t.view_as(t),
    lambda t: t.expand(6, 4),
    lambda t: t.view(torch.int32),
]


@ranks(2)
def test_views_in_memory_order_share_memory_and_move_nothing() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    for cut in [ROWS, FLAT, OWNER]:
        x = place(full, mesh, cut)
        for view in VIEWS:
            with CommDebugMode() as comms:
                result = view(x)
            assert comms.get_total_counts() == 0
            assert_same(result, view(full))
            assert result.to_local().untyped_storage().data_ptr() == x.to_local().untyped_storage().data_ptr()


@ranks(2)
def test_a_view_takes_whole_rows_where_the_units_allow_it() -> None:
    x = place(torch.randn(6, 4), mesh_of(), ROWS)
    assert x.view(-1).placements == (RaggedShard((0,), (1, 2)),)
    assert x.view(-1).view(6, 4).placements == (ROWS,)
    assert x.view(2, 3, 4).placements == (RaggedShard((0, 1), (1, 2)),)
    assert place(torch.randn(6, 4), mesh_of(), FLAT).view(-1).view(6, 4).placements == (FLAT,)


@ranks(2)
def test_writing_through_a_view_reaches_the_base() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    x = place(full, mesh, FLAT)
    x.view(-1).mul_(2)
    full.view(-1).mul_(2)
    assert_same(x, full)


@ranks(2)
def test_what_selects_or_reorders_elements_raises() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    ops: list[Callable[[torch.Tensor], object]] = [
        lambda t: t.t(),
        lambda t: t.T,
        lambda t: t.mT,
        lambda t: t.transpose(0, 1),
        lambda t: t.permute(1, 0),
        lambda t: t[0],
        lambda t: t[1:],
        lambda t: t[:, 0],
        lambda t: t[torch.tensor([0])],
        lambda t: t.split(2),
        lambda t: t.chunk(2),
        lambda t: t.unbind(),
        lambda t: list(t),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack([t, t]),
        lambda t: t.expand(2, 6, 4),
        lambda t: t.repeat(2, 1),
        lambda t: t @ t.new_ones(4),
        lambda t: F.linear(torch.ones(2, 4), t) if not isinstance(t, DTensor) else F.linear(t, t),
        lambda t: t.sort(),
        lambda t: t.topk(2),
        lambda t: t.triu(),
        lambda t: t.diagonal(),
        lambda t: t.nonzero(),
        lambda t: t.roll(1),
        lambda t: t.std(),
        lambda t: t.view(torch.float64),
        lambda t: t.as_strided((2, 2), (1, 1)),
        lambda t: torch.nn.utils.parameters_to_vector([t]).__getitem__(0),
    ]
    for cut in [ROWS, FLAT, OWNER]:
        x = place(full, mesh, cut)
        for op in ops:
            with pytest.raises(RaggedShardError, match=r"x\.redistribute\(placements=\[Replicate\(\)\]\)"):
                op(x)


@ranks(4)
def test_views_beside_another_cut_raise_unless_the_shape_stays() -> None:
    mesh, full = mesh_of(2, 2), torch.randn(12, 6)
    x = place(full, mesh, RaggedShard((0,), (1, 3)), Shard(1))
    assert_same(x.view(12, 6), full)
    with pytest.raises(UnsupportedOpError, match="mixes dims that other mesh axes cut"):
        x.view(-1)


@ranks(2)
def test_inference_mode_decomposes_composite_ops() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    for cut in [ROWS, FLAT]:
        x = place(full, mesh, cut)
        with torch.inference_mode():
            assert_same(torch.multiply(x, 2).flatten().isfinite(), (full * 2).flatten().isfinite())
            assert_same(torch.max(x, x * 2), full * 2)
            with pytest.raises(RaggedShardError):
                torch.matmul(x, x)


# --- gradients

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "squares": lambda t: (t * t).sum(),
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm 3": lambda t: torch.linalg.vector_norm(t, 3),
    "norm inf": lambda t: t.norm(math.inf),
    "max": lambda t: t.max(),
    "amin": lambda t: t.amin(),
    "where": lambda t: torch.where(t > 0, t, -2 * t).sum(),
    "view": lambda t: t.view(-1).pow(2).mean(),
    "unsqueeze": lambda t: (t.unsqueeze(0) * 2).sum(),
    "gelu": lambda t: F.gelu(t).sum(),
    "silu": lambda t: F.silu(t).sum(),
    "relu": lambda t: F.relu(t).sum(),
    "hardswish": lambda t: F.hardswish(t).sum(),
    "leaky": lambda t: F.leaky_relu(t).sum(),
    "softplus": lambda t: F.softplus(t).sum(),
    "clamp": lambda t: t.clamp(-0.5, 0.5).sum(),
    "masked": lambda t: t.masked_fill(t > 0, 0.0).sum(),
    "dtype": lambda t: t.double().sin().float().sum(),
    "scaled": lambda t: (t / t.norm()).tanh().sum(),
    "clone": lambda t: (t.clone() + t.detach()).exp().sum(),
    "twice": lambda t: (t.sin() + t.cos()).sum() * t.mean(),
}


@ranks(2)
def test_gradients_are_those_of_the_unsharded_tensor() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    for cut in [ROWS, FLAT, OWNER]:
        for name, loss in LOSSES.items():
            x, y = place(full, mesh, cut).requires_grad_(), full.clone().requires_grad_()
            loss(x).backward()
            loss(y).backward()
            assert x.grad is not None, name
            assert_same(x.grad, y.grad)


@ranks(2)
def test_gradients_by_rows_stay_cut_and_whole_operands_get_sums() -> None:
    mesh, full, bias = mesh_of(), torch.randn(6, 4), torch.randn(4)
    x, b = place(full, mesh, ROWS).requires_grad_(), place(bias, mesh, Replicate()).requires_grad_()
    y, c = full.clone().requires_grad_(), bias.clone().requires_grad_()
    for tensor, vector in [(x, b), (y, c)]:
        ((tensor + vector).sin().sum(1).pow(2).sum() + (tensor * vector).softmax(1).amax(1).sum()).backward()
    assert_same(x.grad, y.grad)
    torch.testing.assert_close(b.grad.full_tensor(), c.grad)


@ranks(2)
def test_hooks_and_accumulation_see_ragged_gradients() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    for cut in [ROWS, FLAT]:
        x, y = nn.Parameter(place(full, mesh, cut)), nn.Parameter(full.clone())
        seen: list[tuple[Placement, ...]] = []
        x.register_hook(lambda grad, seen=seen: seen.append(grad.placements))
        x.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.placements))
        for _ in range(2):
            (x * x).sum().backward()
            (y * y).sum().backward()
        assert seen == [(cut,)] * 4
        assert_same(x.grad, y.grad)


# --- optimizers

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW fused tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "Adam amsgrad fused": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=True, centered=True, momentum=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, foreach=False),
    "Adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, foreach=True),
}


@ranks(2)
def test_optimizers_step_bit_for_bit_like_on_unsharded_parameters() -> None:
    mesh = mesh_of()
    shapes = [(6, 4), (6, 4), (6, 4), (12,), ()]
    cuts = [ROWS, FLAT, OWNER, RaggedShard((0,), (1, 3)), RaggedShard((), (0, 1))]
    fulls = [torch.randn(shape) for shape in shapes]
    grads = [torch.randn(shape) for shape in shapes]
    for name, make in OPTIMIZERS.items():
        ours = [nn.Parameter(place(full, mesh, cut)) for full, cut in zip(fulls, cuts, strict=True)]
        theirs = [nn.Parameter(full.clone()) for full in fulls]
        optimizers = make(ours), make(theirs)
        for step in range(3):
            for mine, other, grad, cut in zip(ours, theirs, grads, cuts, strict=True):
                mine.grad, other.grad = place(grad * (step + 1), mesh, cut), grad * (step + 1)
            for optimizer in optimizers:
                optimizer.step()
        for mine, other, cut in zip(ours, theirs, cuts, strict=True):
            part = held(other.detach(), [cut], (2,), mesh.get_coordinate() or ())
            # Torch's fused kernels round the last elements of a tensor, which fill no vector, in another way.
            torch.testing.assert_close(mine.to_local(), part, rtol=1e-6 if "fused" in name else 0, atol=0)


@ranks(2)
def test_optimizers_without_a_ragged_form_raise() -> None:
    for make in [torch.optim.Adafactor, torch.optim.Rprop]:
        for cut in [ROWS, FLAT]:
            parameter = nn.Parameter(place(torch.randn(6, 4), mesh_of(), cut))
            parameter.grad = place(torch.randn(6, 4), mesh_of(), cut)
            with pytest.raises(RaggedShardError):
                make([parameter]).step()


# --- modules


@ranks(3)
def test_modules_move_from_the_meta_device_and_change_dtype_also_where_a_rank_owns_nothing() -> None:
    cut = RaggedShard((0,), (0, 1, 0))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.empty(1, 3, 4, device="meta"), mesh_of(), [cut]))
    module.to_empty(device="cpu")
    assert module.weight.to_local().shape == ((1, 3, 4) if dist.get_rank() == 1 else (0, 3, 4))
    assert not module.weight.is_meta
    nn.init.ones_(module.weight)
    module.to(torch.bfloat16)
    assert module.weight.dtype == module.weight.to_local().dtype == torch.bfloat16
    assert_same(module.weight.detach(), torch.ones(1, 3, 4, dtype=torch.bfloat16))


@ranks(2)
def test_an_average_of_shards_is_the_shard_of_the_average() -> None:
    mesh, old, new = mesh_of(), torch.randn(5, 4), torch.randn(5, 4)
    average, weight = (nn.Parameter(place(full, mesh, RaggedShard((0,), (3, 2)))) for full in (old, new))
    with torch.no_grad():
        average.lerp_(weight, 0.25)
    torch.testing.assert_close(average.full_tensor(), old.lerp(new, 0.25))
