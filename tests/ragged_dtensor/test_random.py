"""A ragged tensor gets the random values of the unsharded one, and the generator ends up where that leaves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import held
from ranks import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement

from ragged_dtensor import (
    RaggedShard,
    RaggedShardError,
    StridedRaggedShard,
    UnsupportedOpError,
    distribute_tensor,
    init_full,
)
from ragged_dtensor import random as ragged_random

Fill = Callable[[torch.Tensor], object]

FILLS: dict[str, Fill] = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "uniform_": lambda t: t.uniform_(-1.0, 3.0),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(2.0),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "random_": lambda t: t.random_(),
    "random_ from to": lambda t: t.random_(2, 9),
    "init.normal_": nn.init.normal_,
    "init.uniform_": nn.init.uniform_,
    "init.trunc_normal_": lambda t: nn.init.trunc_normal_(t, 0.5, 2.0, -1.0, 1.0),
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.constant_": lambda t: nn.init.constant_(t, 3.0),
    "init.ones_": nn.init.ones_,
    "init.zeros_": nn.init.zeros_,
}
VECTOR_FILLS = [name for name in FILLS if "kaiming" not in name and "xavier" not in name]


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def cuts(shape: Sequence[int]) -> list[Placement]:
    """Rows, flat elements and one owner, for tensors whose rows and elements allow it."""
    num_ranks = dist.get_world_size()
    rows = (1,) * num_ranks if num_ranks < 3 else (*(1, 0, 2, 0)[: num_ranks - 1], 1)
    uneven = (0,) * (num_ranks - 1) + (1,)
    flat = tuple(range(len(shape)))
    return [RaggedShard((0,), rows), RaggedShard(flat, rows), RaggedShard(flat, uneven)]


def assert_drawn_as_unsharded(
    fill: Fill,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.float32,
) -> None:
    full = torch.full(tuple(shape), 7.0, dtype=dtype)
    sharded = distribute_tensor(full.clone(), mesh, placements)
    torch.manual_seed(42)
    fill(full)
    after = torch.get_rng_state()
    torch.manual_seed(42)
    fill(sharded)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert torch.equal(sharded.to_local(), held(full, placements, tuple(mesh.shape), coordinate))
    assert torch.equal(torch.get_rng_state(), after)


@ranks(1, 3, 4)
def test_every_initialiser_gives_the_values_of_the_unsharded_tensor() -> None:
    mesh = mesh_of()
    for shape in [(12, 5), (4, 3)]:
        for placement in cuts(shape):
            for fill in FILLS.values():
                assert_drawn_as_unsharded(fill, shape, mesh, [placement])
    for shape in [(24,), (4, 3, 1, 2)]:
        for placement in cuts(shape):
            for name in VECTOR_FILLS:
                assert_drawn_as_unsharded(FILLS[name], shape, mesh, [placement])


@ranks(2)
def test_every_dtype_gives_the_values_of_the_unsharded_tensor() -> None:
    mesh = mesh_of()
    for dtype in [torch.float64, torch.bfloat16, torch.float16]:
        for name in ["normal_", "uniform_", "bernoulli_", "exponential_"]:
            assert_drawn_as_unsharded(FILLS[name], (6, 5), mesh, [RaggedShard((0, 1), (1, 2))], dtype)


@ranks(2)
def test_scalars_and_empty_tensors_draw_like_unsharded_ones() -> None:
    mesh = mesh_of()
    for name in ["normal_", "uniform_", "bernoulli_"]:
        assert_drawn_as_unsharded(FILLS[name], (), mesh, [RaggedShard((), (0, 1))])
        assert_drawn_as_unsharded(FILLS[name], (0, 4), mesh, [RaggedShard((0,), (1, 0))])


@ranks(4)
def test_two_mesh_axes_draw_like_the_unsharded_tensor() -> None:
    mesh = mesh_of(2, 2)
    ragged, strided = RaggedShard((0,), (1, 3)), StridedRaggedShard((0,), (1, 2), 2)
    for placements in [(ragged, Shard(1)), (strided, Shard(0)), (Replicate(), ragged), (ragged, Replicate())]:
        for name in ["normal_", "uniform_", "bernoulli_", "init.trunc_normal_"]:
            assert_drawn_as_unsharded(FILLS[name], (12, 6), mesh, placements)


@ranks(1, 3)
def test_chunks_join_without_a_seam() -> None:
    placement = RaggedShard((0, 1), (1,) if dist.get_world_size() == 1 else (1, 0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_random, "CHUNK", 32)
        for numel in [33, 47, 48, 63, 64, 96, 97, 111, 112, 1000]:
            for name in ["normal_", "uniform_", "init.trunc_normal_"]:
                for dtype in [torch.float32, torch.float64, torch.bfloat16]:
                    assert_drawn_as_unsharded(FILLS[name], (numel, 3), mesh_of(), [placement], dtype)


@ranks(2)
def test_large_tensors_never_stand_whole_on_a_rank() -> None:
    full = torch.zeros(1 << 11, 1 << 11)
    sharded = distribute_tensor(full, mesh_of(), [RaggedShard((0,), (1, 3))], src_data_rank=None)
    numels: list[int] = []

    def record(tensor: torch.Tensor, *args: float) -> None:
        numels.append(tensor.numel())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_random, "STREAMED", {record})
        ragged_random._fill(sharded._spec, record, sharded.to_local(), 0.0, 1.0)
    assert sum(numels) == full.numel()
    assert max(numels) <= full.numel() // 4


@ranks(3)
def test_a_generator_that_is_passed_is_used_and_advanced() -> None:
    full, mesh = torch.empty(9, 4), mesh_of()
    sharded = distribute_tensor(full.zero_(), mesh, [RaggedShard((0,), (1, 0, 2))])
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    before = torch.get_rng_state()
    for fill in ["normal_", "uniform_", "bernoulli_", "exponential_"]:
        getattr(full, fill)(generator=theirs)
        getattr(sharded, fill)(generator=ours)
        assert torch.equal(sharded.full_tensor(), full)
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert torch.equal(torch.get_rng_state(), before)


@ranks(3)
def test_new_random_tensors_and_dropout_match_the_unsharded_ones() -> None:
    full, mesh = torch.randn(9, 4), mesh_of()
    sharded = distribute_tensor(full, mesh, [RaggedShard((0, 1), (1, 3, 0))])
    for new in [
        torch.rand_like,
        torch.randn_like,
        lambda t: torch.randint_like(t, 7),
        lambda t: torch.randint_like(t, 3, 9),
        lambda t: torch.rand_like(t, dtype=torch.float64),
        lambda t: torch.bernoulli(t, 0.4),
        lambda t: nn.functional.dropout(t, 0.5),
    ]:
        torch.manual_seed(1)
        expected = new(full)
        torch.manual_seed(1)
        drawn = new(sharded)
        assert drawn.placements == sharded.placements
        assert drawn.dtype == expected.dtype
        assert torch.equal(drawn.full_tensor(), expected)


@ranks(1, 3)
def test_init_full_runs_initialisers_of_whole_matrices() -> None:
    mesh = mesh_of()
    for fn in [nn.init.orthogonal_, nn.init.eye_, lambda t: nn.init.sparse_(t, 0.5)]:
        for placement in cuts((12, 5)):
            assert_drawn_as_unsharded(lambda t, fn=fn: init_full(t, fn), (12, 5), mesh, [placement])
    for placement in cuts((12, 4, 3)):
        assert_drawn_as_unsharded(lambda t: init_full(t, nn.init.dirac_), (12, 4, 3), mesh, [placement])


@ranks(2)
def test_init_full_works_for_stock_placements_and_parameters() -> None:
    weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh_of(), [Shard(0)]))
    torch.manual_seed(3)
    assert init_full(weight, nn.init.orthogonal_) is weight
    torch.manual_seed(3)
    assert torch.equal(weight.full_tensor(), nn.init.orthogonal_(torch.empty(6, 4)))


@ranks(2)
def test_init_full_refuses_a_function_that_writes_a_part() -> None:
    sharded = distribute_tensor(torch.zeros(6, 4), mesh_of(), [RaggedShard((0,), (1, 2))])
    with pytest.raises(RaggedShardError, match=r"left elements of the full tensor of shape \(6, 4\) unwritten"):
        init_full(sharded, lambda full: full[0].zero_())


@ranks(2)
def test_raw_calls_of_whole_matrix_initialisers_name_init_full() -> None:
    for shape, fn in [
        ((6, 4), nn.init.orthogonal_),
        ((4, 6), nn.init.orthogonal_),
        ((6, 4, 3), nn.init.orthogonal_),
        ((4, 6, 3), nn.init.orthogonal_),
        ((6, 4, 1, 1), nn.init.orthogonal_),
        ((2, 3, 2, 2, 2), nn.init.orthogonal_),
        ((6, 4, 3), nn.init.dirac_),
        ((6, 4, 3, 3), nn.init.dirac_),
        ((6, 4, 1, 1, 1), lambda t: nn.init.dirac_(t, groups=2)),
        ((6, 4), lambda t: nn.init.sparse_(t, 0.5)),
        ((6, 4), nn.init.eye_),
    ]:
        flat = RaggedShard(tuple(range(len(shape))), (1, math.prod(shape) - 1))
        for mesh, placements in [
            (mesh_of(), [RaggedShard((0,), (1, 1))]),
            (mesh_of(), [flat]),
            (mesh_of(2, 1), [RaggedShard((0,), (1, 1)), Shard(1)]),
        ]:
            sharded = distribute_tensor(torch.zeros(shape), mesh, placements)
            with pytest.raises(UnsupportedOpError, match=r"init_full\(tensor, fn\)"):
                fn(sharded)


@ranks(2)
def test_random_values_for_a_partial_tensor_or_from_tensors_are_refused() -> None:
    mesh = mesh_of(1, 2)
    ragged = RaggedShard((0,), (1, 1))
    whole = distribute_tensor(torch.zeros(4, 2), mesh, [Replicate(), ragged])
    partial = DTensor.from_local(whole.to_local(), mesh, [Partial(), ragged], shape=torch.Size((4, 2)), stride=(2, 1))
    with pytest.raises(UnsupportedOpError, match="do not add up"):
        partial.normal_()
    with pytest.raises(UnsupportedOpError, match="that are tensors"):
        torch.bernoulli(whole)


@ranks(2)
def test_meta_tensors_are_left_alone() -> None:
    sharded = distribute_tensor(torch.empty(6, 4, device="meta"), mesh_of(), [RaggedShard((0,), (1, 2))])
    state = torch.get_rng_state()
    sharded.normal_()
    nn.init.kaiming_uniform_(sharded)
    init_full(sharded, nn.init.orthogonal_)
    assert torch.equal(torch.get_rng_state(), state)
