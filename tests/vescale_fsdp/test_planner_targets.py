"""Which shares searches over all orders are spent on: the bound, then halfway, then where a proof is likely."""

from __future__ import annotations

from vescale_fsdp.planner.classes import ShareClass
from vescale_fsdp.planner.targets import Targets

CLASS = ShareClass(divisor=10, bound=100, spans_ranks=())


def test_the_bound_comes_first_and_then_the_distance_is_halved() -> None:
    targets = Targets(CLASS, are_complete=False)
    assert targets.next(best=200) == 100
    targets.missed(100, complete=False)
    assert targets.next(best=200) == 150
    targets.hit()
    assert targets.next(best=150) == 130


def test_a_complete_search_that_finds_nothing_halfway_is_followed_by_one_just_below_the_best_share() -> None:
    targets = Targets(CLASS, are_complete=True)
    for target in (100, 150):
        assert targets.next(best=205) == target
        targets.missed(target, complete=True)
    assert targets.next(best=205) == 200
    targets.missed(200, complete=True)
    assert (targets.proved, targets.next(best=205)) == (210, None)


def test_three_searches_in_a_row_that_were_cut_short_are_the_last_and_prove_nothing() -> None:
    targets = Targets(CLASS, are_complete=False)
    for _ in range(3):
        target = targets.next(best=1000)
        assert target is not None
        targets.missed(target, complete=False)
    assert (targets.next(best=1000), targets.proved) == (None, 100)


def test_a_search_that_finds_an_order_allows_more_that_are_cut_short() -> None:
    targets = Targets(CLASS, are_complete=False)
    for best in (1000, 1000, 900, 900):
        target = targets.next(best)
        assert target is not None
        targets.missed(target, complete=False)
        if best == 1000:
            targets.hit()
    assert targets.next(900) is not None
