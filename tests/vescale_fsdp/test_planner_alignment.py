"""Shares and starts are multiples of 16 bytes in the smallest dtype that a layout ever stores, below a byte too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_oracle import Case, violations

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.planner import plan_group
from vescale_fsdp.spec import ParamSpec, alignment, itemsize_bits

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    st.sampled_from([1, 3, None]),
)
def test_shares_and_starts_are_multiples_of_16_bytes_in_every_stored_dtype(
    tensors: list[tuple[int, int]], num_ranks: int, dtypes: list[str], max_lanes: int | None
) -> None:
    specs = [ParamSpec(f"p{i}", (n,), dtypes[0], Granularity(g)) for i, (n, g) in enumerate(tensors)]
    unit = alignment(dtypes)
    group = plan_group(specs, num_ranks, unit=unit, align=unit, max_lanes=max_lanes)
    for dtype in dtypes:
        for elements in (*(lane.share for lane in group.lanes), *(tensor.start for tensor in group.tensors)):
            assert elements * itemsize_bits(dtype) % 128 == 0
    case = Case(tuple(n for n, _ in tensors), tuple(g for _, g in tensors), num_ranks, unit, unit)
    assert list(violations(case, group.layout, [lane.share for lane in group.lanes])) == []


def test_bf16_payload_and_starts_are_16_byte_multiples_where_the_sum_is_not() -> None:
    # pytorch#195450: the parameters' elements add up to 8 k + 3, so an even split leaves odd payloads per rank.
    specs = [ParamSpec("a", (1019,), "bfloat16"), ParamSpec("b", (64, 32), "bfloat16")]
    assert sum(spec.numel for spec in specs) % 8 == 3
    group = plan_group(specs, 4)
    assert group.nbytes % 16 == 0
    assert all(tensor.start * 2 % 16 == 0 for tensor in group.tensors)


def test_no_mxfp8_block_lies_on_two_ranks_where_rows_do_not_divide() -> None:
    # 96 rows over 5 ranks, blocks of 32 along the last dim: 19.2 rows each would end inside a block.
    spec = ParamSpec("w", (96, 64), "bfloat16", Granularity(32, ("blocks of 32 (mxfp8)",)))
    group = plan_group([spec], 5, unit=16, align=16)
    owners = [rank for rank in range(5) for _ in range(len(group.shard_range("w", rank)))]
    assert len(owners) == 96 * 64
    assert all(len(set(owners[block : block + 32])) == 1 for block in range(0, len(owners), 32))
    assert group.share - 96 * 64 // 5 < 32


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 7])
def test_an_alignment_coarser_than_a_block_keeps_blocks_whole(num_ranks: int) -> None:
    case = Case((90, 48, 7), (6, 12, 1), num_ranks, 16, 16)
    specs = [ParamSpec(f"p{n}", (n,), granularity=Granularity(g)) for n, g in ((90, 6), (48, 12), (7, 1))]
    group = plan_group(specs, num_ranks, unit=16, align=16, max_lanes=1)
    assert list(violations(case, group.layout, [group.share])) == []
