"""The worker pool itself: it runs bodies on every rank and turns a failure on any rank into a failed test."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import MAX_THREADS, RankPool, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import fully_shard


@ranks(1, 2, 3)
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_every_rank_takes_part(value: float) -> None:
    tensor = torch.full((2,), value)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [value * dist.get_world_size()] * 2


def fails_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def test_a_failure_on_one_rank_fails_the_test_with_its_text(rank_pool: RankPool) -> None:
    with pytest.raises(pytest.fail.Exception, match="rank one says no"):
        rank_pool.run(2, __file__, "fails_on_rank_one", {})


def trains_on_a_mesh_of_two_axes() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    model(torch.ones(2, 4)).sum().backward()
    for param in model.parameters():
        param.full_tensor()


def test_process_groups_end_with_their_test() -> None:
    pool = RankPool()
    try:
        pool.run(2, __file__, "trains_on_a_mesh_of_two_axes", {})
        assert pool.threads == [1, 1]
    finally:
        pool.close()


KEPT: list[dist.ProcessGroup] = []


def rank_one_keeps_groups() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    KEPT.extend(groups if dist.get_rank() == 1 else [])


def test_a_worker_that_keeps_process_groups_is_replaced(rank_pool: RankPool) -> None:
    rank_pool.run(2, __file__, "trains_on_a_mesh_of_two_axes", {})
    before = rank_pool.pids
    rank_pool.run(2, __file__, "rank_one_keeps_groups", {})
    assert [threads > MAX_THREADS for threads in rank_pool.threads] == [False, True]
    assert [pid == old for pid, old in zip(rank_pool.pids, before, strict=True)][:2] == [True, False]


def skips() -> None:
    pytest.skip("no reason")


def test_a_skip_on_all_ranks_keeps_the_workers(rank_pool: RankPool) -> None:
    rank_pool.run(2, __file__, "trains_on_a_mesh_of_two_axes", {})
    before = rank_pool.pids
    with pytest.raises(pytest.skip.Exception, match="no reason"):
        rank_pool.run(2, __file__, "skips", {})
    assert rank_pool.pids == before
