"""Reductions: every rank contributes its elements, and the result is that of the unsharded tensor, on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import held
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Partial, Placement

from ragged_dtensor import RaggedShard, RaggedShardError, StridedRaggedShard, UnsupportedOpError, distribute_tensor

Reduce = Callable[[torch.Tensor], torch.Tensor]

ROWS = RaggedShard((0,), (1, 0, 2))
FLAT = RaggedShard((0, 1), (5, 0, 7))
CUTS = [ROWS, FLAT, RaggedShard((0, 1), (0, 1, 0))]


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def place(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Dtypes and shapes equal, values up to the order of summation; partial results are reduced first."""
    assert isinstance(result, DTensor)
    assert result.shape == expected.shape
    assert result.dtype == result.to_local().dtype == expected.dtype
    if any(placement.is_partial() for placement in result.placements):
        result = result.redistribute(placements=[Replicate() if p.is_partial() else p for p in result.placements])
    mesh, coordinate = result.device_mesh, result.device_mesh.get_coordinate()
    assert coordinate is not None
    part = held(expected, result.placements, tuple(mesh.shape), coordinate)
    torch.testing.assert_close(result.to_local(), part, equal_nan=True)


ORDERS = [0.5, 1, 2, 3, math.inf, -math.inf, 0, -1, -2]
WHOLE: list[Reduce] = [
    torch.sum,
    torch.mean,
    torch.prod,
    torch.max,
    torch.min,
    torch.amax,
    torch.amin,
    torch.any,
    torch.all,
    torch.count_nonzero,
    torch.nansum,
    torch.argmax,
    torch.argmin,
    torch.norm,
    *(lambda t, p=p: torch.linalg.vector_norm(t, p) for p in ORDERS),
    *(lambda t, p=p: torch.norm(t, p) for p in [1, 2, math.inf]),
    lambda t: torch.sum(t, dtype=torch.float64),
    lambda t: torch.mean(t, dtype=torch.float64),
    lambda t: torch.linalg.vector_norm(t, 2, dtype=torch.float64),
]


@ranks(3, timeout_s=300)
def test_reductions_of_everything_are_the_same_number_on_every_rank() -> None:
    mesh = mesh_of()
    for cut in CUTS:
        for full in [torch.randn(6, 4), torch.zeros(6, 4), -torch.rand(6, 4), torch.full((6, 4), math.inf)]:
            x = place(full, mesh, cut)
            for reduce in WHOLE:
                result = reduce(x)
                assert_same(result, reduce(full))
                assert result.placements == (Replicate(),)
            torch.testing.assert_close(x.sum().item(), full.sum().item())


@ranks(3, timeout_s=300)
def test_means_weigh_every_element_alike() -> None:
    full = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    x = place(full, mesh_of(), RaggedShard((0, 1), (1, 0, 11)))
    assert x.mean().item() == 5.5
    assert place(full[:1], mesh_of(), RaggedShard((0,), (0, 0, 1))).mean().item() == 1.5


@ranks(3, timeout_s=300)
def test_nothing_has_no_largest_element() -> None:
    x = place(torch.zeros(0, 4), mesh_of(), RaggedShard((0,), (0, 1, 0)))
    for reduce in [torch.max, torch.min]:
        with pytest.raises(UnsupportedOpError, match="without elements has no largest or smallest one"):
            reduce(x)


@ranks(3, timeout_s=300)
def test_nan_on_one_rank_is_nan_on_all() -> None:
    mesh = mesh_of()
    for index, cut in itertools.product([0, 11, 23], CUTS):
        full = torch.randn(24).index_fill_(0, torch.tensor(index), math.nan).reshape(6, 4)
        x = place(full, mesh, cut)
        for reduce in [
            torch.max,
            torch.min,
            torch.amax,
            torch.sum,
            torch.mean,
            lambda t: torch.linalg.vector_norm(t, math.inf),
        ]:
            assert reduce(x).isnan().item()
        assert x.argmax().item() == index
        assert torch._foreach_norm([x], math.inf)[0].isnan().item()


@ranks(3, timeout_s=300)
def test_other_dtypes_reduce_as_unsharded_tensors_do() -> None:
    mesh, numbers = mesh_of(), torch.randint(-5, 5, (6, 4))
    for cut in CUTS:
        for full in [numbers, numbers.to(torch.int8), numbers > 0, numbers.to(torch.uint8)]:
            x = place(full, mesh, cut)
            for reduce in [torch.sum, torch.amax, torch.amin, torch.any, torch.all, torch.count_nonzero, torch.prod]:
                assert_same(reduce(x), reduce(full))
        for dtype in [torch.bfloat16, torch.float16, torch.float64]:
            full = torch.randn(6, 4).to(dtype)
            x = place(full, mesh, cut)
            for reduce in [torch.sum, torch.mean, torch.amax, torch.norm, lambda t: torch.linalg.vector_norm(t, 3)]:
                assert_same(reduce(x), reduce(full))


@ranks(3, timeout_s=300)
def test_float16_norms_do_not_overflow_between_ranks() -> None:
    x = place(torch.full((6, 4), 200.0, dtype=torch.float16), mesh_of(), ROWS)
    assert abs(x.norm().item() - 200 * math.sqrt(24)) < 1
    assert abs(torch._foreach_norm([x])[0].item() - 200 * math.sqrt(24)) < 1


BY_DIM: list[Callable[..., torch.Tensor]] = [
    torch.sum,
    torch.mean,
    torch.amax,
    torch.amin,
    torch.prod,
    torch.any,
    torch.all,
    lambda t, d, **k: torch.linalg.vector_norm(t, 2, d, **k),
    lambda t, d, **k: torch.linalg.vector_norm(t, math.inf, d, **k),
    lambda t, d, **k: torch.linalg.vector_norm(t, -1, d, **k),
]


@ranks(3, timeout_s=300)
def test_reductions_by_dim_take_all_cut_dims_or_none() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4, 2)
    pair = RaggedShard((0, 1), (5, 0, 7))
    for cut, dims in [(ROWS, [0, 1, 2, -1, (0, 1), (1, 2), (0, 2)]), (pair, [2, (0, 1), (0, 1, 2)])]:
        x = place(full, mesh, cut)
        for reduce, dim, keepdim in itertools.product(BY_DIM, dims, [False, True]):
            if isinstance(dim, tuple) and reduce is torch.prod:
                continue
            assert_same(reduce(x, dim, keepdim=keepdim), reduce(full, dim, keepdim=keepdim))
        for reduce in [torch.sum, torch.mean]:
            assert any(p.is_partial() for p in reduce(x, (0, 1)).placements)
            assert reduce(x, 2).placements == (cut,)
    for dim in [0, 1, (1, 2)]:
        with pytest.raises(UnsupportedOpError, match=r"dims \(0, 1\) are cut as one; reduce all or none"):
            place(full, mesh, pair).sum(dim)


@ranks(4)
def test_two_mesh_axes_reduce_over_both() -> None:
    mesh, full = mesh_of(2, 2), torch.randn(12, 6)
    cut = RaggedShard((0,), (1, 3))
    for placements in [
        (cut, Shard(1)),
        (StridedRaggedShard((0,), (1, 2), 2), Shard(0)),
        (Replicate(), RaggedShard((0, 1), (5, 7))),
        (RaggedShard((0, 1), (5, 7)), Replicate()),
        (cut, RaggedShard((0, 1), (1, 2))),
    ]:
        x = place(full, mesh, *placements)
        for reduce in [torch.sum, torch.mean, torch.amax, torch.norm, lambda t: torch.linalg.vector_norm(t, math.inf)]:
            assert_same(reduce(x), reduce(full))
        assert_same(torch._foreach_norm([x])[0], full.norm())
        assert torch.equal(x, x.clone())
    x = place(full, mesh, cut, Shard(1))
    for reduce, dim, keepdim in itertools.product([torch.sum, torch.mean, torch.amax], [0, 1], [False, True]):
        assert_same(reduce(x, dim, keepdim=keepdim), reduce(full, dim, keepdim=keepdim))
    assert x.sum(0).placements == (Partial(), Shard(0))


@ranks(2)
def test_values_still_to_be_reduced_may_be_summed_but_not_measured() -> None:
    mesh, cut = mesh_of(1, 2), RaggedShard((0,), (1, 2))
    local = place(torch.randn(6, 4), mesh, Replicate(), cut).to_local()
    x = DTensor.from_local(local, mesh, [Partial(), cut], shape=torch.Size((6, 4)), stride=(4, 1))
    assert x.sum().placements == (Partial(), Replicate())
    for reduce in [torch.norm, torch.amax, torch.any, torch.argmax, lambda t: torch._foreach_norm([t])]:
        with pytest.raises(RaggedShardError):
            reduce(x)


@ranks(3, timeout_s=300)
def test_equal_and_allclose_ask_every_rank() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    for cut, index in itertools.product(CUTS, [0, 23]):
        other = full.clone()
        other.view(-1)[index] += 1e-3
        x, y = place(full, mesh, cut), place(other, mesh, cut)
        assert torch.equal(x, x.clone())
        assert not torch.equal(x, y)
        assert torch.allclose(x, y, atol=1e-2)
        assert not torch.allclose(x, y)
        assert torch.equal(x, place(full, mesh, Replicate()))
        assert not torch.equal(x, place(full[:3], mesh, Replicate()))
        assert torch.isfinite(x).all().item()
        assert torch.isclose(x, y).sum().item() == 23
    with pytest.raises(RaggedShardError, match="cut differently"):
        torch.equal(place(full, mesh, ROWS), place(full, mesh, FLAT))


@ranks(3, timeout_s=300)
def test_ops_along_a_dim_that_is_not_cut_stay_on_their_rank() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4, 2)
    ops: list[Callable[[torch.Tensor, int], torch.Tensor]] = [
        lambda t, d: torch.softmax(t, d),
        lambda t, d: torch.log_softmax(t, dim=d),
        lambda t, d: torch.cumsum(t, d),
        lambda t, d: torch.max(t, d).values,
        lambda t, d: torch.min(t, dim=d, keepdim=True).indices,
    ]
    for cut, dims in [(ROWS, [1, 2, -1]), (RaggedShard((0, 1), (5, 0, 7)), [2])]:
        x = place(full, mesh, cut)
        for op, dim in itertools.product(ops, dims):
            with CommDebugMode() as comms:
                assert_same(op(x, dim), op(full, dim))
            assert comms.get_total_counts() == 0
        with pytest.raises(UnsupportedOpError, match="goes along dim 0, which is cut"):
            torch.softmax(x, 0)


@ranks(2)
def test_a_single_element_is_not_read_from_one_rank() -> None:
    mesh = mesh_of()
    for x in [
        place(torch.ones(1), mesh, RaggedShard((0,), (0, 1))),
        place(torch.tensor(1.0), mesh, RaggedShard((), (1, 0))),
    ]:
        for read in [torch.Tensor.item, float, bool]:
            with pytest.raises(RaggedShardError, match=r"x.full_tensor\(\).item\(\)"):
                read(x)


# --- gradient clipping and scaling


def gradients(mesh: DeviceMesh) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Ragged, sharded and whole parameters with gradients, and their unsharded twins."""
    torch.manual_seed(1)
    fulls = [nn.Parameter(torch.randn(6, 4)) for _ in range(5)]
    placements: list[Placement] = [*CUTS, Shard(0), Replicate()]
    ours = [nn.Parameter(place(full.detach(), mesh, p)) for full, p in zip(fulls, placements, strict=True)]
    for mine, full in zip(ours, fulls, strict=True):
        full.grad = torch.randn(6, 4)
        mine.grad = place(full.grad, mesh, *mine.placements)
    return ours, fulls


@ranks(3, timeout_s=300)
def test_clipping_matches_the_unsharded_norm_for_any_order_and_mix() -> None:
    for order, foreach in itertools.product([1, 2, 3, math.inf], [True, False]):
        ours, fulls = gradients(mesh_of())
        for mine, full in [(ours[:3], fulls[:3]), (ours, fulls)]:
            total = nn.utils.clip_grad_norm_(mine, 0.5, order, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(full, 0.5, order, foreach=foreach)
            assert_same(total, expected)
            for a, b in zip(mine, full, strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    ours, fulls = gradients(mesh_of())
    assert_same(nn.utils.get_total_norm([p.grad for p in ours]), nn.utils.get_total_norm([p.grad for p in fulls]))
    nn.utils.clip_grad_value_(ours, 0.1)
    assert all(p.grad.abs().max().item() <= 0.1 + 1e-6 for p in ours)


@ranks(3, timeout_s=300)
def test_norms_of_a_list_take_one_collective() -> None:
    mesh = mesh_of()
    xs = [place(torch.randn(6, 4), mesh, cut) for cut in CUTS * 3]
    for order in [2, math.inf]:
        with CommDebugMode() as comms:
            torch._foreach_norm(xs, order)
        assert comms.get_total_counts() == 1


@ranks(3, timeout_s=300)
def test_a_nonfinite_norm_raises_on_every_rank_before_any_gradient_changes() -> None:
    ours, _ = gradients(mesh_of())
    ours[1].grad.to_local()[:1] = math.inf if dist.get_rank() == 0 else 1.0
    before = [p.grad.to_local().clone() for p in ours]
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    assert all(torch.equal(p.grad.to_local(), old) for p, old in zip(ours, before, strict=True))


@ranks(3, timeout_s=300)
def test_a_grad_scaler_skips_the_step_on_every_rank() -> None:
    for broken in [False, True]:
        ours, fulls = gradients(mesh_of())
        results = []
        for parameters in [ours, fulls]:
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            if broken:
                part = parameters[2].grad.to_local() if parameters is ours else parameters[2].grad
                part.view(-1)[:1] = math.inf  # on the only owner; other ranks have nothing to break
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            results.append(scaler.get_scale())
        assert results[0] == results[1] == (4.0 if broken else 8.0)
        for mine, full in zip(ours, fulls, strict=True):
            torch.testing.assert_close(mine.full_tensor(), full)


@ranks(3, timeout_s=300)
def test_arguments_that_torch_does_not_hash_still_count() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    x, numbers = place(full, mesh, ROWS), place((full * 9).long(), mesh, FLAT)
    for _ in range(2):
        assert_same(x.sum(0), full.sum(0))
        assert_same(x.sum(0, dtype=torch.float64), full.sum(0, dtype=torch.float64))
        assert_same(torch.linalg.vector_norm(x, 2, 0), torch.linalg.vector_norm(full, 2, 0))
        for dtype in [torch.float64, None]:
            assert_same(
                torch.linalg.vector_norm(x, 2, 0, dtype=dtype), torch.linalg.vector_norm(full, 2, 0, dtype=dtype)
            )
        for factor in [2, 2.5]:
            assert_same(torch._foreach_mul([numbers], factor)[0], (full * 9).long() * factor)


@ranks(3, timeout_s=300)
def test_reductions_of_rows_are_cached_by_dim_dtype_and_keepdim() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4, 2)
    x = place(full, mesh, ROWS)
    for _ in range(2):
        for dim, keepdim, dtype in itertools.product(
            [1, 2, -1, (1, 2), 0, (0, 2)], [False, True], [None, torch.float64]
        ):
            assert_same(x.sum(dim, keepdim=keepdim, dtype=dtype), full.sum(dim, keepdim=keepdim, dtype=dtype))
            assert_same(x.mean(dim, keepdim=keepdim, dtype=dtype), full.mean(dim, keepdim=keepdim, dtype=dtype))
        for dim in [1, 2, -1]:
            assert_same(x.prod(dim, dtype=torch.float64), full.prod(dim, dtype=torch.float64))
            assert_same(x.prod(dim), full.prod(dim))
            assert_same(torch.cumsum(x, dim, dtype=torch.float64), torch.cumsum(full, dim, dtype=torch.float64))
            assert_same(torch.cumsum(x, dim), torch.cumsum(full, dim))


@ranks(2)
def test_no_cached_answer_lets_another_memory_format_through() -> None:
    x = place(torch.randn(8, 3, 2, 2), mesh_of(), RaggedShard((0,), (1, 3)))
    for op in [
        lambda t, **k: t.to(torch.float64, **k),
        lambda t, **k: t.clone(**k),
        lambda t, **k: torch.empty_like(t, **k),
        lambda t, **k: torch.zeros_like(t, **k),
        lambda t, **k: torch.full_like(t, 2.0, **k),
        lambda t, **k: torch.ones_like(t, **k),
    ]:
        for _ in range(2):
            assert op(x).to_local().is_contiguous()
            with pytest.raises(UnsupportedOpError, match=r"channels_last\. Ragged tensors are contiguous"):
                op(x, memory_format=torch.channels_last)
