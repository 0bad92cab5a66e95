"""Movements on gloo ranks: every pair of placements against slicing the full tensor, gradients, dtypes, async."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import SHAPES, held, numbered, placements_of, placements_on
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import (
    LayoutError,
    RaggedShard,
    StridedRaggedShard,
    UnsupportedTransitionError,
    distribute_tensor,
    from_local,
)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor made by slicing, without our code."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = held(full, placements, tuple(mesh.shape), coordinate)
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())


def check(full: torch.Tensor, x: DTensor) -> None:
    """`x` holds what slicing `full` gives."""
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    wanted = held(full, x.placements, tuple(x.device_mesh.shape), coordinate)
    assert x.to_local().shape == wanted.shape, (x.placements, x.to_local().shape, wanted.shape)
    assert torch.equal(x.to_local(), wanted), x.placements


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_on_one_axis_equals_slicing_the_full_tensor(shape: tuple[int, ...]) -> None:
    """A22: every pair is right or raises."""
    mesh, full = line(), numbered(shape)
    options = placements_of(shape, mesh.size())
    for source, target in itertools.product(options, repeat=2):
        check(full, placed(full, mesh, [source]).redistribute(placements=[target]))


@ranks(4)
@pytest.mark.parametrize("shape", [(8,), (4, 3), (4, 2, 3), (2, 2, 1, 2, 3), (0, 3), (3,), ()], ids=str)
def test_pairs_on_two_axes_equal_slicing_the_full_tensor(shape: tuple[int, ...]) -> None:
    mesh, full = init_device_mesh("cpu", (2, 2)), numbered(shape)
    options = placements_on(shape, (2, 2))
    for source, target in itertools.product(options[:: 1 + len(options) // 20], repeat=2):
        check(full, placed(full, mesh, source).redistribute(placements=target))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
def test_partial_values_are_reduced_into_every_cut(reduce_op: str) -> None:
    mesh, n = line(), dist.get_world_size()
    factor = {"sum": n * (n + 1) / 2, "avg": (n + 1) / 2, "max": n, "min": 1}[reduce_op]
    for shape in SHAPES:
        full = numbered(shape)
        for target in placements_of(shape, n):
            partial = DTensor.from_local(full * (dist.get_rank() + 1), mesh, [Partial(reduce_op)])
            check(full * factor, partial.redistribute(placements=[target]))


@ranks(4)
def test_partial_beside_another_placement_is_reduced_along_its_own_axis() -> None:
    mesh, full = init_device_mesh("cpu", (2, 2)), numbered((8, 6))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    ragged, strided = RaggedShard((0,), (1, 3)), StridedRaggedShard((0,), (1, 3), 2)
    for other, target in ((Shard(1), ragged), (Shard(0), strided), (Replicate(), RaggedShard((0, 1), (5, 7)))):
        local = held(full, (Replicate(), other), (2, 2), coordinate) * (coordinate[0] + 1)
        partial = DTensor.from_local(local, mesh, [Partial(), other], shape=full.shape, stride=full.stride())
        check(full * 3, partial.redistribute(placements=[target, other]))


@ranks(4)
def test_gradients_of_replicas_and_shards_are_reduced_on_both_axes() -> None:
    mesh, full = init_device_mesh("cpu", (2, 2)), numbered((8, 6))
    partial = DTensor.from_local(full * (dist.get_rank() + 1), mesh, [Partial(), Partial()])
    for target in ((Replicate(), RaggedShard((0,), (1, 3))), (RaggedShard((0,), (1, 3)), Replicate())):
        check(full * 10, partial.redistribute(placements=target))
    ragged = held(full, (Replicate(), RaggedShard((0,), (1, 3))), (2, 2), mesh.get_coordinate() or ())
    partial = DTensor.from_local(
        ragged, mesh, [Partial("max"), RaggedShard((0,), (1, 3))], shape=full.shape, stride=full.stride()
    )
    check(full, partial.redistribute(placements=[Replicate(), RaggedShard((0,), (1, 3))]))


@ranks(2, 3)
def test_the_gradient_of_a_movement_is_the_movement_back() -> None:
    mesh, full = line(), numbered((12, 5))
    weight = numbered((12, 5)).sin()
    options = placements_of((12, 5), mesh.size())
    for source, target in itertools.product(options[::2], options):
        x = placed(full, mesh, [source]).requires_grad_()
        y = x.redistribute(placements=[target])
        y.backward(placed(weight, mesh, [target]))
        assert x.grad is not None
        assert x.grad.placements == (source,)
        check(weight, x.grad)


@ranks(2)
def test_the_gradient_of_a_reduction_is_replicated() -> None:
    mesh = line()
    x = DTensor.from_local(numbered((6, 2)), mesh, [Partial()]).requires_grad_()
    x.redistribute(placements=[RaggedShard((0,), (1, 2))]).backward(
        placed(numbered((6, 2)), mesh, [RaggedShard((0,), (1, 2))])
    )
    assert x.grad is not None
    assert x.grad.placements == (Replicate(),)
    check(numbered((6, 2)), x.grad)


@ranks(2, 3)
def test_movements_can_be_differentiated_twice() -> None:
    if torch.__version__.startswith("2.11."):
        pytest.skip("redistribute of torch 2.11 can be differentiated once")
    mesh = line()
    x = placed(numbered((6, 4)), mesh, [RaggedShard((0, 1), (1, 2, 1)[: mesh.size()])]).requires_grad_()
    full = x.full_tensor()
    (grad,) = torch.autograd.grad((full**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.full_tensor().sum(), x)
    check(6 * numbered((6, 4)), second)


@ranks(2, 3)
def test_a_local_gradient_becomes_a_ragged_gradient_of_the_full_shape() -> None:
    mesh = line()
    for placement in (RaggedShard((0, 1), (5, 3, 4)[: mesh.size()]), RaggedShard((0,), (1, 2, 0)[: mesh.size()])):
        full = numbered((12, 10)) if mesh.size() == 3 else numbered((12, 4))
        x = placed(full, mesh, [placement]).requires_grad_()
        (x.to_local() ** 2).sum().backward()
        assert x.grad is not None
        assert (x.grad.shape, x.grad.stride()) == (x.shape, x.stride())
        check(2 * full, x.grad)


@ranks(2)
def test_an_expanded_gradient_becomes_a_contiguous_one() -> None:
    x = placed(numbered((6,)), line(), [RaggedShard((0,), (1, 2))]).requires_grad_()
    x.to_local().sum().backward()
    assert x.grad is not None
    assert x.grad.to_local().is_contiguous()
    check(torch.ones(6), x.grad)


@ranks(2)
def test_full_tensor_passes_gradients_back_to_the_owners() -> None:
    x = placed(numbered((4, 3)), line(), [RaggedShard((0, 1), (0, 1))]).requires_grad_()
    (x.full_tensor() * numbered((4, 3))).sum().backward()
    assert x.grad is not None
    check(numbered((4, 3)), x.grad)


@ranks(2)
def test_forward_and_backward_run_in_the_dtypes_asked_for() -> None:
    x = placed(numbered((8, 2)) / 3, line(), [RaggedShard((0,), (1, 3))]).requires_grad_()
    y = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert y.dtype == torch.bfloat16
    check((numbered((8, 2)) / 3).bfloat16(), y.detach())
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@ranks(2, 4)
def test_asynchronous_movements_give_the_same_values() -> None:
    mesh, full = line(), numbered((12, 4))
    options = placements_of((12, 4), mesh.size())
    for source, target in itertools.product(options[::3], repeat=2):
        check(full, placed(full, mesh, [source]).redistribute(placements=[target], async_op=True))


@ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.uint8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    mesh, full = line(), numbered((6, 2)).to(dtype)
    equal, ragged, root = RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 2)), RaggedShard((0,), (0, 1))
    for source, target in itertools.product((equal, ragged, root, Replicate()), repeat=2):
        moved = placed(full, mesh, [source]).redistribute(placements=[target]).to_local()
        wanted = placed(full, mesh, [target]).to_local()
        assert torch.equal(moved.view(torch.uint8), wanted.view(torch.uint8))


@ranks(2)
def test_a_transposed_parameter_keeps_its_stride() -> None:
    full = numbered((8, 4)).t()
    x = distribute_tensor(full, line(), [RaggedShard((0,), (1, 3))])
    assert x.stride() == full.stride()
    assert torch.equal(x.to_local(), full.split([1, 3])[dist.get_rank()])
    assert x.full_tensor().stride() == full.stride()
    assert torch.equal(x.full_tensor(), full)


@ranks(2)
def test_a_local_tensor_of_another_size_is_refused() -> None:
    full = numbered((8, 2))
    x = DTensor.from_local(full[:3], line(), [RaggedShard((0,), (1, 3))], shape=full.shape, stride=full.stride())
    with pytest.raises(LayoutError, match=r"holds a tensor of shape \(3, 2\).* gives it \([26], 2\)"):
        x.redistribute(placements=[Replicate()])


@ranks(2)
def test_what_is_impossible_raises_naming_both_placements() -> None:
    x = placed(numbered((4, 3)), line(), [RaggedShard((0,), (1, 1))])
    for target in (Partial(), Partial("max")):
        with pytest.raises(
            UnsupportedTransitionError, match=r"no way from \(RaggedShard.*\) to \(Partial.*Replicate\(\)"
        ):
            x.redistribute(placements=[target])
    grid = init_device_mesh("cpu", (2, 1))
    y = distribute_tensor(numbered((4, 3)), grid, [Replicate(), RaggedShard((0,), (1,))])
    with pytest.raises(UnsupportedTransitionError, match=r"no way from \(Replicate.*RaggedShard.*to \(Partial.*Ragged"):
        y.redistribute(placements=[Partial(), y.placements[1]])
    replica = distribute_tensor(numbered((4, 3)), grid, [Replicate(), Replicate()])
    with pytest.raises(UnsupportedTransitionError, match=r"to \(Partial.*Ragged"):
        replica.redistribute(placements=[Partial(), y.placements[1]])
    with pytest.raises(LayoutError, match="4 rows do not split into 3 units"):
        x.redistribute(placements=[RaggedShard((0,), (1, 2))])
    other = init_device_mesh("cpu", (1, 2))
    with pytest.raises(UnsupportedTransitionError, match=r"RaggedShard.*another mesh"):
        x.redistribute(other, [Replicate(), Replicate()])


@ranks(4)
def test_torch_strided_shards_are_reached_through_torch() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    if torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 refuses to move its own strided shards")
    mesh, full = init_device_mesh("cpu", (2, 2)), numbered((8, 3))
    x = distribute_tensor(full, mesh, [StridedRaggedShard((0,), (1, 3), 2), Shard(0)])
    fsdp = x.redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)])
    assert torch.equal(fsdp.full_tensor(), full)
    check(full, fsdp.redistribute(placements=x.placements))
    # A ragged cut beside one is taken inside the part that it leaves: rows 0 1 4 5 and 2 3 6 7, cut 1 + 3.
    beside = [RaggedShard((0,), (1, 3)), _StridedShard(0, split_factor=2)]
    (dp, tp) = mesh.get_coordinate() or ()
    part = full[[0, 1, 4, 5] if tp == 0 else [2, 3, 6, 7]]
    for y in (x.redistribute(placements=beside), distribute_tensor(full, mesh, beside)):
        assert torch.equal(y.to_local(), part[:1] if dp == 0 else part[1:])
        assert torch.equal(y.full_tensor(), full)
        assert torch.equal(y.redistribute(placements=x.placements).to_local(), x.to_local())
    with pytest.raises(LayoutError, match=r"leave parts of unequal size of \(7, 3\)"):
        distribute_tensor(full[:7], mesh, beside)


@ranks(2)
def test_from_local_infers_the_shape_only_where_every_rank_can() -> None:
    mesh, rank = line(), dist.get_rank()
    x = from_local(torch.ones(2 + 4 * rank, 5), mesh, [RaggedShard((0,), (1, 3))])
    assert x.shape == (8, 5)
    for placement in (RaggedShard((0,), (1, 0)), RaggedShard((0, 1), (1, 3))):
        with pytest.raises(LayoutError, match=r"cannot be inferred.*Pass shape="):
            from_local(torch.ones(1 - rank, 5), mesh, [placement])
        with pytest.raises(LayoutError, match=r"cannot be inferred.*Pass shape="):
            DTensor.from_local(torch.ones(1 - rank, 5), mesh, [placement])
