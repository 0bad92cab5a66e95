"""Torch keeps our answers and gives them to later calls: no order of calls may give one call another's answer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import RankPool, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_dtensor import RaggedShard, RaggedShardError, distribute_tensor

Call = Callable[[torch.Tensor], torch.Tensor]

ORDERS = [0, 0.5, 1, 2, 3, math.inf, -math.inf]
DTYPES = [None, torch.float64]


def norms() -> list[Call]:
    return [
        *(lambda t, p=p, d=d: torch.linalg.vector_norm(t, p, dtype=d) for p, d in itertools.product(ORDERS, DTYPES)),
        *(lambda t, p=p, k=k: torch.linalg.vector_norm(t, p, 1, k) for p in ORDERS for k in (False, True)),
        *(lambda t, p=p: torch.linalg.vector_norm(t, p, 0) for p in (0.5, 1, 2, math.inf)),
        *(lambda t, p=p, d=d: t.norm(p, dim=1, dtype=d) for p, d in itertools.product(ORDERS, DTYPES)),
        *(lambda t, p=p, d=d: torch._foreach_norm([t, -t], p, d)[1] for p, d in itertools.product(ORDERS, DTYPES)),
    ]


def reductions() -> list[Call]:
    names, where = ["sum", "mean", "prod", "nansum"], itertools.product([0, 1, -1], [False, True])
    by_dim = itertools.product(names, where, DTYPES)
    return [
        *(lambda t, n=n, d=d: getattr(torch, n)(t, dtype=d) for n, d in itertools.product(names, DTYPES)),
        *(lambda t, n=n, w=w, d=d: getattr(torch, n)(t, w[0], keepdim=w[1], dtype=d) for n, w, d in by_dim),
        *(lambda t, n=n, d=d: getattr(torch, n)(t, d) for n in ("amax", "amin", "any", "all") for d in (0, 1)),
        *(lambda t, n=n, k=k: getattr(t, n)(1, keepdim=k)[1] for n in ("max", "min") for k in (False, True)),
        lambda t: (t * 10).int().sum(1),
        lambda t: (t * 10).int().sum(1, dtype=torch.int32),
    ]


def others() -> list[Call]:
    numbers, shapes = [2, 2.5, 1j, True], [(24,), (3, 8), (2, 3, 4), (6, 4), (1, 24), (24, 1), (6, 2, 2)]
    return [
        *(lambda t, n=n: t * n for n in numbers),
        *(lambda t, n=n: (t * 10).long() + n for n in numbers),
        *(lambda t, n=n: torch._foreach_mul([t], n)[0] for n in numbers),
        *(lambda t, s=s: t.view(s) for s in shapes),
        *(lambda t, s=s: t.reshape(s) * 2 for s in shapes),
        *(lambda t, d=d: torch.softmax(t, 1, dtype=d) for d in DTYPES),
        *(lambda t, d=d: torch.cumsum(t, 1, dtype=d) for d in DTYPES),
        *(lambda t, a=a: torch.add(t, t, alpha=a) for a in (1, 2, 0.5)),
        *(lambda t, m=m: torch.div(t, 0.3, rounding_mode=m) for m in (None, "floor", "trunc")),
        *(lambda t, k=k: t.round(decimals=k) for k in (0, 1, 2)),
        *(lambda t, f=f: torch.nn.functional.normalize(t, dim=f) for f in (0, 1)),
    ]


CUTS = [RaggedShard((0,), (1, 2)), RaggedShard((0, 1), (5, 7)), RaggedShard((0,), (0, 1)), RaggedShard((0,), (1, 1))]


@ranks(2, timeout_s=300)
def test_shuffled_calls_give_the_unsharded_results() -> None:
    mesh, full = init_device_mesh("cpu", (dist.get_world_size(),)), torch.randn(6, 4)
    calls = [*norms(), *reductions(), *others()]
    expected = [call(full) for call in calls]
    num_right = 0
    for seed in range(2):
        order = random.Random(seed).sample(range(len(calls)), len(calls))
        for cut, index in itertools.product(CUTS, order):
            x = distribute_tensor(full.clone(), mesh, [cut], src_data_rank=None)
            try:
                result = calls[index](x)
            except RaggedShardError:
                continue  # such as a reduction of one of two dims that are cut as one
            assert isinstance(result, DTensor)
            assert result.dtype == result.to_local().dtype
            torch.testing.assert_close(result.full_tensor(), expected[index], equal_nan=True)
            num_right += 1
    assert num_right > 4 * len(calls)


def reductions_over_a_grid() -> None:
    mesh, full = init_device_mesh("cpu", (2, 2)), torch.randn(12, 6)
    for placements in ([RaggedShard((0,), (1, 3)), Shard(1)], [Replicate(), RaggedShard((0,), (1, 2))]):
        x = distribute_tensor(full, mesh, placements)
        assert math.isclose(x.sum().item(), full.sum().item(), rel_tol=1e-4, abs_tol=1e-4)
        assert math.isclose(x.norm().item(), full.norm().item(), rel_tol=1e-4)
        assert math.isclose(torch._foreach_norm([x])[0].item(), full.norm().item(), rel_tol=1e-4)


def reductions_after_other_groups() -> None:
    dist.new_subgroups(1)  # so that the mesh's groups have other names than in the run before
    dist.new_group([0, 1])
    reductions_over_a_grid()


def test_answers_do_not_outlive_their_process_groups(rank_pool: RankPool) -> None:
    for run in ("reductions_over_a_grid", "reductions_after_other_groups", "reductions_over_a_grid"):
        rank_pool.run(4, __file__, run, {})


@ranks(2)
def test_numbers_and_scalar_tensors_promote_alike_on_owners_and_others() -> None:
    mesh, double = init_device_mesh("cpu", (2,)), torch.tensor(2.0, dtype=torch.float64)
    z = distribute_tensor(torch.tensor(3.0), mesh, [RaggedShard((), (0, 1))])
    for factor in (2, 1j, 2.5, True, double, 2.5, double):
        product, expected = z * factor, torch.tensor(3.0) * factor
        assert product.dtype == product.to_local().dtype == expected.dtype
        assert torch.equal(product.full_tensor(), expected)
