"""Payload and scale planes against sums done by hand and against every element's own address."""

from __future__ import annotations

import pytest

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.errors import PlanError
from vescale_fsdp.formats.planes import Planes
from vescale_fsdp.formats.tiling import Tiling
from vescale_fsdp.layout import LanePlan, Layout
from vescale_fsdp.planner import plan_group
from vescale_fsdp.spec import ParamSpec


def two_ranks() -> Planes:
    """The drawing of the docstring: a (3, 64) and b (1, 40) in rows of 32."""
    layout = Layout(2, 16, 16, (LanePlan(128, 128),), (0, 0), (0, 192), 128)
    return Planes(layout, (Tiling((1, 32), (3, 64)), Tiling((1, 32), (1, 40))), bits=8, scale_nbytes=1)


def test_the_drawing_in_the_docstring() -> None:
    planes = two_ranks()
    assert planes.payload_nbytes == (128,)
    assert planes.scale_share == 16
    assert planes.wire_nbytes == 128 + 16
    assert [(planes.scale_span(t, r).begin, len(planes.scale_span(t, r))) for r in (0, 1) for t in (0, 1)] == [
        (0, 4),
        (4, 0),
        (0, 2),
        (2, 2),
    ]


def test_a_tensors_payload_is_one_run_and_its_scales_one_run_per_owner() -> None:
    planes = two_ranks()
    assert [(s.begin, s.end) for s in (planes.payload_span(0), planes.payload_span(1))] == [(0, 192), (192, 232)]
    assert [(s.begin, s.end) for s in planes.scale_spans(0)] == [(0, 4), (16, 18)]
    assert [(s.begin, s.end) for s in planes.scale_spans(1)] == [(18, 20)]


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 16])
def test_every_scale_and_byte_has_one_place_and_shares_are_whole_16_bytes(bits: int, num_ranks: int) -> None:
    shapes = [(96, 64), (7, 50), (640,), (3, 10, 32), (0, 4), ()]
    tilings = tuple(Tiling((1, 32), shape) for shape in shapes)
    specs = [
        ParamSpec(f"p{i}", shape, "float32", Granularity(4 * tiling.granularity))
        for i, (shape, tiling) in enumerate(zip(shapes, tilings, strict=True))
    ]
    plan = plan_group(specs, num_ranks, unit=64, align=64)
    planes = Planes(plan.layout, tilings, bits, scale_nbytes=4)
    assert all(nbytes % 16 == 0 for nbytes in (*planes.payload_nbytes, planes.scale_share * 4))
    taken = [
        index for i in range(len(shapes)) for span in planes.scale_spans(i) for index in range(span.begin, span.end)
    ]
    assert len(taken) == len(set(taken)) == sum(tiling.num_blocks for tiling in tilings)
    assert max(taken) < num_ranks * planes.scale_share
    for i, spec in enumerate(specs):
        whole = planes.payload_span(i)
        assert len(whole) == -(-spec.numel * bits // 8)
        local = [planes.local_payload_span(i, rank) for rank in range(num_ranks)]
        assert sum(map(len, local)) == len(whole)
        share = planes.payload_nbytes[plan.layout.lane_of[i]]
        begins = [rank * share + span.begin for rank, span in enumerate(local) if len(span)]
        assert begins == sorted(begins)
        assert not begins or begins[0] == whole.begin


def test_the_share_holds_the_scales_of_the_rank_with_most() -> None:
    layout = Layout(2, 16, 16, (LanePlan(64, 64),), (0, 0), (0, 64), 64)
    planes = Planes(layout, (Tiling((1,), (64,)), Tiling((64,), (64,))), bits=8, scale_nbytes=2)
    assert planes.scale_share == 64


def test_a_share_whose_payload_is_no_multiple_of_16_bytes_is_refused() -> None:
    layout = Layout(2, 16, 16, (LanePlan(16, 16),), (0,), (0,), 16)
    with pytest.raises(PlanError, match="16 elements of 4 bits are no multiple of 16 bytes"):
        Planes(layout, (Tiling((1, 32), (1, 32)),), bits=4, scale_nbytes=1)


def test_one_tiling_per_tensor() -> None:
    with pytest.raises(PlanError, match="one tiling per tensor, 2, got 1"):
        Planes(two_ranks().layout, (Tiling((1, 32), (3, 64)),), bits=8, scale_nbytes=1)
