"""The worker pool itself: it runs bodies on every rank and turns a failure on any rank into a failed test."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, ranks


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
