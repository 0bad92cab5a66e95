"""Routes of matrices in integers: every run arrives, every result returns, and a bucket holds no more than it may."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from ragged_dtensor import RaggedShard
from vescale_fsdp.optim.holdings import holding_of, piece_at
from vescale_fsdp.optim.matrices import matrices_of
from vescale_fsdp.optim.route import Loan, Route


def loans_of(shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[int, ...], owner: Any) -> list[Loan]:
    replicated = frozenset(axis for axis, placement in enumerate(placements) if placement == Replicate())
    loans = []
    for matrix in matrices_of(shape):
        holdings = {}
        for coordinate in itertools.product(*map(range, mesh)):
            if (held := holding_of(matrix, shape, piece_at(shape, placements, mesh, coordinate))) is not None:
                holdings[coordinate] = held
        loans.append(Loan(matrix, owner, holdings, replicated))
    return loans


def simulate(loans: list[Loan], axes: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What every rank has after all outbound hops, and after all returns; checks that only holders send."""
    routes = {c: Route(tuple(loans), axes, mesh, c, 10**6) for c in itertools.product(*map(range, mesh))}
    arrived = {c: {(i, c) for i, loan in enumerate(loans) if c in loan.keys} for c in routes}
    returned: dict[Any, set[Any]] = {c: set() for c in routes}
    num_buckets = len(routes[next(iter(routes))].buckets)
    for bucket, hop in itertools.product(range(num_buckets), range(len(axes))):
        _deliver({c: route.buckets[bucket].out[hop] for c, route in routes.items()}, arrived)
    for i, loan in enumerate(loans):
        returned[loan.owner] |= {(i, key) for key in loan.keys}
    for bucket, hop in itertools.product(range(num_buckets), reversed(range(len(axes)))):
        _deliver({c: route.buckets[bucket].back[hop] for c, route in routes.items()}, returned)
    return arrived, returned


def _deliver(messages: dict[Any, Any], held: dict[Any, set[Any]]) -> None:
    for here, mine in messages.items():
        for message in mine:
            assert message in messages[message.source]
            assert message in messages[message.target]
            if message.target == here:
                runs = {(message.loan, key) for key in message.keys}
                assert runs <= held[message.source]
                held[here] |= runs


CASES = [
    ((6, 4), (RaggedShard((0, 1), (5, 0, 19)),), (3,), (1,), (0,)),
    ((6, 4), (RaggedShard((0,), (1, 2)), Shard(1)), (2, 2), (1, 0), (1, 0)),
    ((6, 4), (Replicate(), RaggedShard((0,), (1, 2))), (2, 2), (1, 0), (0, 1)),
    ((6, 4), (RaggedShard((0,), (1, 2)), Replicate()), (2, 2), (0, 1), (1, 0)),
    ((3, 6, 4), (Replicate(), RaggedShard((0, 1), (5, 13)), Shard(2)), (2, 2, 2), (1, 0, 1), (0, 2, 1)),
]


@pytest.mark.parametrize(("shape", "placements", "mesh", "owner", "axes"), CASES)
def test_the_owner_receives_every_run_and_every_holder_its_result(
    shape: Any, placements: Any, mesh: Any, owner: Any, axes: Any
) -> None:
    loans = loans_of(shape, placements, mesh, owner)
    arrived, returned = simulate(loans, axes, mesh)
    for i, loan in enumerate(loans):
        assert {(i, key) for key in loan.keys} <= arrived[owner]
        for coordinate in loan.holdings:
            assert (i, loan.key(coordinate)) in returned[coordinate]


def test_a_matrix_that_lies_whole_at_its_owner_does_not_travel() -> None:
    loans = loans_of((6, 4), (RaggedShard((0, 1), (0, 1)),), (2,), (1,))
    (bucket,) = Route(tuple(loans), (0,), (2,), (1,), 100).buckets
    assert bucket.out == ((),)
    assert bucket.back == ((),)
    assert (bucket.goes_out, bucket.comes_back) == ((False,), (False,))


def test_nothing_is_sent_out_along_an_axis_of_replicas() -> None:
    loans = loans_of((6, 4), (Replicate(), RaggedShard((0,), (1, 2))), (2, 2), (1, 0))
    (bucket,) = Route(tuple(loans), (0, 1), (2, 2), (1, 1), 100).buckets
    assert bucket.out[0] == ()
    assert [m.numel for m in bucket.out[1]] == [16]


@pytest.mark.parametrize("bucket_numel", [1, 24, 60, 1000])
def test_no_rank_sends_or_computes_more_than_a_bucket_unless_it_is_one_matrix(bucket_numel: int) -> None:
    placements = (RaggedShard((0, 1), (1, 2, 3)),)
    loans = [loan for n in range(12) for loan in loans_of((6, 4), placements, (3,), (n % 3,))]
    for rank in range(3):
        route = Route(tuple(loans), (0,), (3,), (rank,), bucket_numel)
        assert sorted(i for bucket in route.buckets for i in bucket.loans) == list(range(12))
        for bucket in route.buckets:
            computed = [24 for i in bucket.loans if loans[i].owner == (rank,)]
            sent = [m.numel for m in bucket.out[0] if m.source == (rank,)]
            assert len(computed) <= 1 or sum(computed) <= bucket_numel
            assert len(sent) <= 1 or sum(sent) <= bucket_numel


def test_every_bucket_gives_work_to_every_owner() -> None:
    loans = [loan for n in range(12) for loan in loans_of((6, 4), (Shard(0),), (3,), (n // 4,))]
    route = Route(tuple(loans), (0,), (3,), (0,), 48)
    assert [len(bucket.loans) for bucket in route.buckets] == [6, 6]
    assert {loans[i].owner for i in route.buckets[0].loans} == {(0,), (1,), (2,)}


def test_a_bucket_of_no_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_numel: expected at least 1 element, got 0"):
        Route((), (0,), (2,), (0,), 0)
