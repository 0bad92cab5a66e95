"""distribute_tensor and from_local: ours, and torch's own under names bound long before."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import SHAPES, held, numbered, placements_of, placements_on
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor  # bound before ours installs anything
from torch.distributed.tensor.debug import CommDebugMode

from ragged_dtensor import (
    LayoutError,
    RaggedShard,
    RaggedShardError,
    StridedRaggedShard,
    distribute_tensor,
    from_local,
)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def check(full: torch.Tensor, x: DTensor) -> None:
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    wanted = held(full, x.placements, tuple(x.device_mesh.shape), coordinate)
    assert (x.shape, x.stride(), x.dtype) == (full.shape, full.stride(), full.dtype)
    assert x.to_local().shape == wanted.shape
    assert torch.equal(x.to_local(), wanted), x.placements


@ranks(1, 2, 3, 4)
def test_rank_0_decides_the_values_of_every_cut() -> None:
    mesh, rank = line(), dist.get_rank()
    for shape in SHAPES:
        for placement in placements_of(shape, mesh.size()):
            check(numbered(shape), distribute_tensor(numbered(shape) + 100 * rank, mesh, [placement]))


@ranks(4)
def test_the_first_rank_of_each_axis_decides_on_two_axes() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    for shape in ((8,), (4, 2, 3), (0, 3)):
        options = placements_on(shape, (2, 2))
        for placements in options[:: 1 + len(options) // 30]:
            check(numbered(shape), distribute_tensor(numbered(shape) + 100 * rank, mesh, placements))


@ranks(2)
def test_another_rank_may_decide_and_none_keeps_everyones_own_without_talking() -> None:
    mesh, rank = line(), dist.get_rank()
    ragged, full = [RaggedShard((0,), (1, 2))], torch.full((3,), float(rank))
    assert distribute_tensor(full, mesh, ragged, src_data_rank=1).to_local().tolist() == [1.0] * (rank + 1)
    with CommDebugMode() as traffic:
        own = distribute_tensor(full, mesh, ragged, src_data_rank=None)
    assert own.to_local().tolist() == [float(rank)] * (rank + 1)
    assert traffic.get_total_counts() == 0


@ranks(2)
def test_torch_s_own_function_takes_ragged_placements_under_an_old_name() -> None:
    mesh, full = line(), numbered((6, 2))
    with pytest.raises(RuntimeError, match="leaf"):  # its own checks are in place
        torch_distribute_tensor(full.requires_grad_() * 2, mesh, [Shard(0)])
    full = numbered((6, 2))
    for placement in (RaggedShard((0,), (1, 2)), RaggedShard((0, 1), (5, 7)), Shard(0), Replicate()):
        for function in (torch_distribute_tensor, torch.distributed.tensor.distribute_tensor, distribute_tensor):
            check(full, function(full, mesh, [placement]))
    assert torch_distribute_tensor.__name__ == "distribute_tensor"
    assert list(torch_distribute_tensor.__annotations__) == [
        "tensor",
        "device_mesh",
        "placements",
        "src_data_rank",
        "return",
    ]


@ranks(2)
def test_parameters_keep_requires_grad_and_partial_beside_ragged_sums_up() -> None:
    x = distribute_tensor(torch.nn.Parameter(numbered((4, 2))), line(), [RaggedShard((0,), (1, 3))])
    assert x.requires_grad
    assert x.is_leaf
    mesh = init_device_mesh("cpu", (2, 1))
    y = distribute_tensor(numbered((4, 2)), mesh, [Partial(), RaggedShard((0,), (1,))])
    assert torch.equal(y.full_tensor(), numbered((4, 2)))


@ranks(2)
def test_a_dtensor_is_given_back_or_refused() -> None:
    mesh = line()
    x = distribute_tensor(numbered((4, 2)), mesh, [RaggedShard((0,), (1, 3))])
    assert distribute_tensor(x, mesh, [RaggedShard((0,), (1, 3))]) is x
    with pytest.raises(RaggedShardError, match="Call redistribute instead"):
        distribute_tensor(x, mesh, [RaggedShard((0,), (3, 1))])
    with pytest.raises(RaggedShardError, match="takes leaf tensors"):
        distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [RaggedShard((0,), (1, 3))])


@ranks(2)
def test_the_mesh_of_the_context_is_taken() -> None:
    with line():
        check(numbered((4,)), distribute_tensor(numbered((4,)), placements=[RaggedShard((0,), (1, 3))]))


@ranks(2)
def test_meta_tensors_are_cut_without_talking() -> None:
    x = distribute_tensor(torch.empty(4, 2, device="meta"), line(), [RaggedShard((0,), (1, 3))])
    assert x.to_local().shape == (1 + 2 * dist.get_rank(), 2)
    assert x.to_local().is_meta


@ranks(2)
def test_units_of_another_mesh_are_refused() -> None:
    with pytest.raises(LayoutError, match="units for 3 ranks, the mesh axis has 2"):
        distribute_tensor(numbered((6,)), line(), [RaggedShard((0,), (1, 2, 3))])


@ranks(1, 2, 4)
def test_pieces_become_the_tensor_with_shape_and_stride_given() -> None:
    mesh, full = line(), numbered((12, 5))
    for placement in placements_of((12, 5), mesh.size()):
        local = held(full, (placement,), (mesh.size(),), (dist.get_rank(),))
        for make in (from_local, DTensor.from_local):
            check(full, make(local, mesh, [placement], shape=full.shape, stride=full.stride()))


@ranks(3)
def test_the_shape_is_inferred_from_the_units() -> None:
    mesh, full = line(), numbered((12, 5))
    placement = RaggedShard((0,), (1, 2, 3))
    local = held(full, (placement,), (3,), (dist.get_rank(),))
    for make in (from_local, DTensor.from_local):
        check(full, make(local, mesh, [placement]))
    check(full, from_local(local, mesh, [placement], run_check=True))


@ranks(2)
def test_a_scalar_needs_no_shape() -> None:
    mesh = line()
    local = torch.tensor([7.0])[: dist.get_rank()]
    for make in (from_local, DTensor.from_local):
        x = make(local, mesh, [RaggedShard((), (0, 1))])
        assert x.shape == ()
        assert x.full_tensor() == 7.0


@ranks(2)
def test_the_shape_is_refused_on_every_rank_where_it_cannot_be_inferred() -> None:
    mesh, rank = line(), dist.get_rank()
    for placement, local in (
        (RaggedShard((0,), (1, 0)), torch.ones(1 - rank, 5)),
        (RaggedShard((0, 1), (1, 3)), torch.ones(5 + 10 * rank)),
    ):
        for make in (from_local, DTensor.from_local):
            with pytest.raises(LayoutError, match=r"cannot be inferred .* Pass shape= and stride="):
                make(local, mesh, [placement])


@ranks(2)
def test_pieces_that_do_not_follow_the_units_are_refused() -> None:
    mesh, rank = line(), dist.get_rank()
    with pytest.raises(LayoutError, match=r"gives it \([28],\)"):
        from_local(torch.ones(3), mesh, [RaggedShard((0,), (1, 4))], shape=(10,))
    with pytest.raises(LayoutError, match=r"disagree on the shape .*\(4,\), \(8,\)"):
        from_local(torch.ones(1 + 5 * rank), mesh, [RaggedShard((0,), (1, 3))], run_check=True)


@ranks(2)
def test_gradients_flow_through_from_local() -> None:
    local = torch.ones(1 + 2 * dist.get_rank(), 3, requires_grad=True)
    x = from_local(local, line(), [RaggedShard((0,), (1, 3))])
    (x.full_tensor() * numbered((4, 3))).sum().backward()
    assert torch.equal(local.grad, numbered((4, 3)).split([1, 3])[dist.get_rank()])  # type: ignore[arg-type]


@ranks(4)
def test_shape_is_inferred_beside_tensor_parallel_shards() -> None:
    mesh, full = init_device_mesh("cpu", (2, 2)), numbered((8, 6))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for placements in (
        (StridedRaggedShard((0,), (1, 3), 2), Shard(0)),
        (RaggedShard((0,), (1, 3)), Shard(1)),
        (Replicate(), RaggedShard((0,), (1, 3))),
    ):
        check(full, from_local(held(full, placements, (2, 2), coordinate), mesh, placements))


@ranks(1, 2)
def test_stock_placements_pass_through() -> None:
    mesh, full = line(), numbered((5, 3))
    for placement in (Shard(0), Shard(-1), Replicate()):
        ours, torchs = (f(full, mesh, [placement]) for f in (distribute_tensor, torch_distribute_tensor))
        assert ours.placements == torchs.placements
        assert torch.equal(ours.to_local(), torchs.to_local())
    assert torch.equal(from_local(full, mesh).full_tensor(), full)
    assert from_local(full[:0], mesh, [Shard(0)], shape=(0, 3)).shape == (0, 3)


@ranks(2, 3)
def test_factories_make_the_local_part_only() -> None:
    placement = RaggedShard((0, 1), (1, 4, 1)[: dist.get_world_size()])
    shape = (5, 6) if dist.get_world_size() == 3 else (5, 5)
    x = zeros(*shape, device_mesh=line(), placements=[placement])
    check(torch.zeros(shape), x)


@ranks(2)
def test_pairs_of_functions_agree_on_every_option() -> None:
    mesh, full = line(), numbered((6, 2)) + 100 * dist.get_rank()
    for placement, source in itertools.product(placements_of((6, 2), 2), (0, 1, None)):
        ours = distribute_tensor(full, mesh, [placement], src_data_rank=source)
        torchs = torch_distribute_tensor(full, mesh, [placement], src_data_rank=source)
        assert torch.equal(ours.to_local(), torchs.to_local())
