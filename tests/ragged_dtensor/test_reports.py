"""Public reports about sharded tensors, restated for ragged ones. The name says the claim, the docstring the report.

C01 and so on number the reports.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import held, numbered, placements_on
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from ragged_dtensor import LayoutError, RaggedShard, StridedRaggedShard, distribute_tensor, from_local


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@ranks(4)
def test_a_round_trip_does_not_grow_the_tensor() -> None:
    """C01, pytorch#103306: Replicate -> Shard(0) -> Replicate of 5 rows over 4 ranks had 8 rows."""
    full = torch.rand(5, 10)
    x = distribute_tensor(full, line(), [Replicate()]).redistribute(placements=[RaggedShard((0,), (1, 2, 0, 2))])
    back = x.redistribute(placements=[Replicate()])
    assert back.shape == (5, 10)
    assert torch.equal(back.to_local(), full)


@ranks(4)
def test_ranks_never_disagree_on_a_guessed_shape() -> None:
    """C02, pytorch#110762: `from_local` of chunks of 3, 3, 3 and 1 rows made some ranks see 12 rows and others 4."""
    mesh, full = line(), numbered((10, 2))
    local = full.chunk(4)[dist.get_rank()]
    ragged = RaggedShard((0,), (3, 3, 3, 1))
    for make in (from_local, DTensor.from_local):
        assert make(local, mesh, [ragged]).shape == (10, 2)
        assert torch.equal(make(local, mesh, [ragged], shape=full.shape, stride=(2, 1)).full_tensor(), full)
        with pytest.raises(LayoutError, match="cannot be inferred"):
            make(local, mesh, [RaggedShard((0,), (5, 5, 0, 0))])


@ranks(4)
def test_uneven_pieces_are_concatenated_in_rank_order_and_never_taken_for_chunks() -> None:
    """C03, pytorch#144109: 2, 3, 4 and 5 columns passed `run_check` as Shard(1), and `full_tensor` garbled them."""
    rank, mesh = dist.get_rank(), line()
    local = torch.full((2 + rank, 2), float(rank))
    x = from_local(local, mesh, [RaggedShard((0,), (2, 3, 4, 5))])
    assert torch.equal(x.full_tensor(), torch.cat([torch.full((2 + r, 2), float(r)) for r in range(4)]))
    wrong = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((14, 2)), stride=(2, 1))
    if rank != 2:  # torch.chunk gives 4, 4, 4 and 2 rows
        with pytest.raises(LayoutError, match=r"Uneven Shard\(d\) must follow torch.chunk"):
            wrong.redistribute(placements=[RaggedShard((0,), (2, 3, 4, 5))])


@ranks(2)
def test_a_mean_weighs_every_element_alike() -> None:
    """C04, pytorch#162692: the mean over uneven shards averaged the ranks' means, and an empty rank gave NaN."""
    for shape, units, mean in (((3, 4), (2, 1), 5.5), ((1, 4), (1, 0), 1.5), ((3, 4), (0, 1), 5.5)):
        x = distribute_tensor(numbered(shape), line(), [RaggedShard((0,), units)])
        result = x.mean()
        assert (result.full_tensor() if isinstance(result, DTensor) else result) == mean


@ranks(4)
def test_uneven_pairs_on_a_2_d_mesh_equal_chunking_the_global_tensor() -> None:
    """C05, pytorch#115310: redistributing an uneven dim on a 2-D mesh was wrong."""
    mesh, full = init_device_mesh("cpu", (2, 2)), numbered((5, 3))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    options = placements_on((5, 3), (2, 2))
    ragged = [option for option in options if any(isinstance(p, RaggedShard) for p in option)]
    for source, target in itertools.product(ragged[::4], options[::5]):
        y = distribute_tensor(full, mesh, source).redistribute(placements=target)
        assert torch.equal(y.to_local(), held(full, target, (2, 2), coordinate))


@ranks(4)
@pytest.mark.parametrize("size", [6, 8, 10, 12])
def test_tensor_parallel_then_ragged_on_the_same_dim_keeps_the_order(size: int) -> None:
    """C06, pytorch#129206, fixed by pytorch#163843: TP then FSDP on one dim came back in another order."""
    mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(size)
    units = (1, size // 2 - 1)
    x = distribute_tensor(full, mesh, [StridedRaggedShard((0,), units, 2), Shard(0)])
    assert torch.equal(x.full_tensor(), full)


@ranks(4)
@pytest.mark.parametrize("size", [5, 7, 9])
def test_pieces_of_unequal_size_are_cut_at_the_same_rows(size: int) -> None:
    """C06, pytorch#163843 again: over 2 TP ranks, 5 rows are 3 and 2; units share the 3 and are clipped to the 2."""
    mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(size)
    rows = -(-size // 2)
    for units in ((1, rows - 1), (rows - 1, 1), (0, 1), (1, 0)):
        placements = [StridedRaggedShard((0,), units, 2), Shard(0)]
        x = distribute_tensor(full, mesh, placements)
        cut = rows * units[0] // sum(units)
        (dp, tp) = mesh.get_coordinate() or ()
        piece = full[tp * rows : (tp + 1) * rows]
        assert torch.equal(x.to_local(), piece[:cut] if dp == 0 else piece[cut:])
        assert torch.equal(x.full_tensor(), full)
        replica = distribute_tensor(full, mesh, [Replicate(), Replicate()])
        assert torch.equal(replica.redistribute(placements=placements).to_local(), x.to_local())
    with pytest.raises(LayoutError, match=f"{rows} rows do not split into {rows + 1} units"):
        distribute_tensor(full, mesh, [StridedRaggedShard((0,), (1, rows), 2), Shard(0)])


@ranks(4)
def test_a_view_across_the_cut_is_right() -> None:
    """C07, pytorch#179502: `view(-1, 6)` of a (12, 8) tensor kept its shard of dim 1 and gave wrong numbers."""
    full, mesh = numbered((12, 8)), line()
    for units in ((3, 0, 3, 6), (1, 1, 1, 9)):  # cuts between rows of 6, and inside them
        x = distribute_tensor(full, mesh, [RaggedShard((0,), units)])
        assert torch.equal(x.view(-1, 6).full_tensor(), full.view(-1, 6))


@ranks(2)
def test_moving_to_another_dim_is_contiguous_forward_and_backward() -> None:
    """C08, pytorch#141835: Shard -> Shard differed between eager and compiled by the stride of its result."""
    x = distribute_tensor(numbered((4, 4)), line(), [RaggedShard((0, 1), (5, 11))]).requires_grad_()
    y = x.redistribute(placements=[Shard(1)])
    assert y.to_local().is_contiguous()
    y.backward(distribute_tensor(numbered((4, 4)), line(), [Shard(1)]))
    assert x.grad is not None
    assert x.grad.to_local().is_contiguous()
    assert torch.equal(x.grad.full_tensor(), numbered((4, 4)))


@ranks(4)
def test_cuts_fall_on_unit_multiples_and_elementwise_ops_do_not_talk() -> None:
    """C10: pytorch#169320 and pytorch#148269 ask for: unit = block, all data on one rank allowed, no dim in the cut."""
    block, units = 6, (1, 3, 0, 2)
    x = distribute_tensor(numbered((4, 9)), line(), [RaggedShard((0, 1), units)])
    assert x.to_local().numel() == block * units[dist.get_rank()]
    root = distribute_tensor(numbered((4, 9)), line(), [RaggedShard((0, 1), (0, 0, 1, 0))])
    assert root.to_local().numel() == (36 if dist.get_rank() == 2 else 0)
    with CommDebugMode() as traffic:
        y = (x * 2 + x).exp()
    assert traffic.get_total_counts() == 0
    torch.testing.assert_close(y.full_tensor(), (numbered((4, 9)) * 3).exp())


@ranks(4)
def test_a_flat_cut_with_an_idle_rank_is_a_value_and_moves() -> None:
    """C11: hyper-parallel#594 specifies it: dims (0, 1), units (2, 3, 0, 5), shape (10, 4)."""
    placement = RaggedShard((0, 1), (2, 3, 0, 5))
    x = distribute_tensor(numbered((10, 4)), line(), [placement])
    assert x.to_local().numel() == (8, 12, 0, 20)[dist.get_rank()]
    assert placement == RaggedShard([0, 1], [4, 6, 0, 10])
    assert hash(placement) == hash(RaggedShard([0, 1], [4, 6, 0, 10]))
    assert eval(repr(placement)) == placement
    for target in (Replicate(), Shard(0), Shard(1), RaggedShard((0,), (1, 1, 1, 7))):
        assert torch.equal(x.redistribute(placements=[target]).full_tensor(), numbered((10, 4)))


@ranks(4)
def test_rows_that_do_not_divide_are_cut_without_visible_padding() -> None:
    """C12, hyper-parallel#196: 5 rows over 4 ranks would not start."""
    hybrid = init_device_mesh("cpu", (2, 2))
    for mesh, placements, rows in (
        (line(), [RaggedShard((0,), (2, 1, 1, 1))], (2, 1, 1, 1)),
        (hybrid, [Replicate(), RaggedShard((0,), (3, 2))], (3, 2, 3, 2)),
    ):
        x = distribute_tensor(numbered((5, 3)), mesh, placements)
        assert x.to_local().shape == (rows[dist.get_rank()], 3)
        assert x.to_local().untyped_storage().nbytes() == x.to_local().nbytes  # no padding behind it
        assert x.shape == (5, 3)
        assert torch.equal(x.full_tensor(), numbered((5, 3)))


@ranks(2)
def test_a_negative_dim_beside_a_ragged_axis_is_the_same_placement() -> None:
    """C13, pytorch#188188: Shard(-1) and Shard(1) compared unequal. Ragged dims are never negative."""
    mesh = init_device_mesh("cpu", (2, 1))
    negative, positive = (
        distribute_tensor(numbered((4, 6)), mesh, [RaggedShard((0,), (1, 3)), Shard(dim)]) for dim in (-1, 1)
    )
    assert negative.placements == positive.placements
    assert hash(negative.placements) == hash(positive.placements)
    with pytest.raises(LayoutError, match="Negative dims are not accepted"):
        RaggedShard((-2,), (1, 3))


@ranks(2)
def test_a_scalar_parameter_has_one_owner() -> None:
    """C17, pytorch#132934: 0-dim parameters could not be sharded, and the failure was obscure."""
    x = distribute_tensor(torch.nn.Parameter(torch.tensor(1.0)), line(), [RaggedShard((), (0, 1))])
    assert x.shape == ()
    assert x.to_local().shape == (dist.get_rank(),)
    assert x.full_tensor() == 1.0


@ranks(2)
def test_a_parameter_without_elements_has_a_gradient_without_elements() -> None:
    """C18, DeepSpeed#8279: a zero-element parameter broke backward."""
    x = distribute_tensor(torch.nn.Parameter(torch.empty(0, 4)), line(), [RaggedShard((0,), (1, 0))])
    (x.full_tensor().sum() * 0).backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 4)


@ranks(2)
def test_a_transposed_parameter_keeps_its_stride_and_its_values() -> None:
    """C19: stock `fully_shard` refuses transposed parameters."""
    parameter = torch.nn.Parameter(torch.randn(8, 4).t())
    x = distribute_tensor(parameter, line(), [RaggedShard((0,), (1, 3))])
    assert x.stride() == parameter.stride()
    assert torch.equal(x.full_tensor(), parameter)


@ranks(2)
def test_averages_of_shards_are_gathered_without_a_hang() -> None:
    """C38, miles-credit#416: saving an EMA hung, because `from_local` without a shape saw other shapes per rank."""
    mesh, full = line(), numbered((5, 2))
    weight = distribute_tensor(full, mesh, [RaggedShard((0,), (3, 2))])
    average = weight.to_local() * 0.5 + 0.5
    ema = from_local(average, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())
    assert torch.equal(ema.full_tensor(), full * 0.5 + 0.5)
    assert torch.equal(from_local(average, mesh, weight.placements).full_tensor(), full * 0.5 + 0.5)


@ranks(2)
def test_it_is_clear_whose_data_counts() -> None:
    """C50, pytorch#143883: a scatter that nobody needs, and no word on whose data wins."""
    mine = torch.full((3,), float(dist.get_rank()))
    placement = [RaggedShard((0,), (1, 2))]
    assert distribute_tensor(mine, line(), placement).full_tensor().tolist() == [0, 0, 0]
    with CommDebugMode() as traffic:
        own = distribute_tensor(mine, line(), placement, src_data_rank=None)
    assert traffic.get_total_counts() == 0
    assert own.full_tensor().tolist() == [0, 1, 1]
