"""What a movement sends: which collectives, and how many elements leave this rank."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from ragged_oracle import held, numbered, placements_of
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_dtensor import RaggedShard, distribute_tensor

COLLECTIVES = {"all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast_", "reduce_"}


class Traffic(TorchDispatchMode):
    """The collectives that ran, and how many elements each got to send to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in COLLECTIVES and func.namespace in ("_c10d_functional", "c10d"):
            tensor = torch.utils._pytree.tree_leaves(args)[0]
            sent = tensor.numel()
            if name == "all_to_all_single":
                splits = list(args[2])
                sent = sum(splits) - splits[dist.get_rank() % len(splits)]  # the last axis' rank
            self.calls.append((name, sent))
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> int:
        return sum(numel for _, numel in self.calls)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def owners(shape: tuple[int, ...], placement: Placement) -> torch.Tensor:
    """For every element of the full tensor, in order, the rank that holds it."""
    n = dist.get_world_size()
    ranks = torch.empty(numbered(shape).numel(), dtype=torch.long)
    for rank in range(n):
        ranks[held(numbered(shape), (placement,), (n,), (rank,)).long().flatten()] = rank
    return ranks


def moved(source: Placement, target: Placement, shape: tuple[int, ...] = (12, 5)) -> Traffic:
    mesh = line()
    x = distribute_tensor(numbered(shape), mesh, [source], src_data_rank=None)
    with Traffic() as traffic:
        x.redistribute(placements=[target])
    return traffic


@ranks(2, 3, 4)
def test_only_elements_that_change_rank_leave_a_rank() -> None:
    rank = dist.get_rank()
    sharded = [p for p in placements_of((12, 5), dist.get_world_size()) if not isinstance(p, Replicate)]
    for source, target in itertools.product(sharded, repeat=2):
        if isinstance(source, Shard) and isinstance(target, Shard):
            continue  # torch's own
        before, after = owners((12, 5), source), owners((12, 5), target)
        traffic = moved(source, target)
        assert traffic.sent == int(((before == rank) & (after != rank)).sum()), (source, target)
        assert traffic.names == ["all_to_all_single"] * bool((before != after).any()), (source, target)


@ranks(2, 4)
def test_a_source_with_one_owner_broadcasts() -> None:
    n = dist.get_world_size()
    traffic = moved(RaggedShard((0, 1), (0,) * (n - 1) + (1,)), Replicate())
    assert traffic.calls == [("broadcast_", 60)]


@ranks(2, 4)
def test_equal_units_use_the_equal_size_collectives() -> None:
    n = dist.get_world_size()
    equal = RaggedShard((0,), (1,) * n)
    assert moved(equal, Replicate()).calls == [("all_gather_into_tensor", 60 // n)]
    partial = DTensor.from_local(numbered((12, 5)), line(), [Partial()])
    with Traffic() as traffic:
        partial.redistribute(placements=[equal])
    assert traffic.calls == [("reduce_scatter_tensor", 60)]


@ranks(4)
def test_unequal_shares_are_padded_to_the_largest_or_sent_by_their_owners() -> None:
    mild, skewed = RaggedShard((0,), (2, 1, 2, 1)), RaggedShard((0,), (0, 1, 11, 0))
    assert moved(mild, Replicate()).calls == [("all_gather_into_tensor", 20)]
    assert moved(skewed, Replicate()).calls == [("broadcast_", 5), ("broadcast_", 55)]
    for target, calls in ((mild, [("reduce_scatter_tensor", 80)]), (skewed, [("reduce_", 5), ("reduce_", 55)])):
        partial = DTensor.from_local(numbered((12, 5)), line(), [Partial()])
        with Traffic() as traffic:
            partial.redistribute(placements=[target])
        assert traffic.calls == calls


@ranks(2)
def test_cutting_a_replica_sends_nothing() -> None:
    for target in placements_of((12, 5), 2):
        assert moved(Replicate(), target).calls == []


@ranks(4)
def test_one_axis_of_two_moves_among_its_own_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(numbered((6, 8)), mesh, [Shard(1), RaggedShard((0,), (1, 2))])
    with Traffic() as traffic:
        x.redistribute(placements=[Shard(1), RaggedShard((0,), (2, 1))])
    assert traffic.calls == [("all_to_all_single", (dist.get_rank() % 2) * 2 * 4)]


@ranks(3)
def test_distributing_sends_each_piece_once_from_its_source() -> None:
    with Traffic() as traffic:
        distribute_tensor(numbered((12, 5)), line(), [RaggedShard((0,), (1, 2, 3))])
    assert traffic.calls == [("all_to_all_single", 50 if dist.get_rank() == 0 else 0)]
