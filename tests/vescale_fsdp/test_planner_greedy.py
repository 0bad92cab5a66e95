"""The earliest legal start of each tensor, against every start tried one by one."""

from __future__ import annotations

import random

from vescale_fsdp.planner.greedy import NOWHERE, end_of_run
from vescale_fsdp.planner.problem import Kind


def earliest_end(position: int, kind: Kind, *, spans_ranks: bool, share: int) -> int:
    """Try every start up to three shares on."""
    for start in range(position, position + 3 * share + 1):
        cuts = range((start // share + 1) * share, start + kind.numel, share)
        if all((cut - start) % kind.granularity == 0 for cut in cuts) and (spans_ranks or len(cuts) < 2):
            return start + kind.numel
    return NOWHERE


def test_tensors_that_fill_a_share_leave_no_gap_behind_them() -> None:
    assert end_of_run(0, Kind(10, 3, 3, 3), 3, False, 20, 60) == 30


def test_a_run_of_equal_tensors_ends_where_each_earliest_start_puts_it() -> None:
    rng = random.Random(7)
    for _ in range(600):
        share, numel, count, begin = (rng.randint(low, high) for low, high in ((1, 40), (1, 60), (1, 8), (0, 50)))
        granularity = rng.randint(1, numel)
        kind, spans_ranks, end = Kind(numel, granularity, granularity, count), share % granularity == 0, begin
        for _ in range(count):
            end = end if end == NOWHERE else earliest_end(end, kind, spans_ranks=spans_ranks, share=share)
        assert end_of_run(begin, kind, count, spans_ranks, share, 10_000) == end, (begin, kind, share)
