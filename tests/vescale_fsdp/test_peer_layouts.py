"""The layouts of other systems in benchmarks/ give the numbers of the reference table."""

from __future__ import annotations

import csv
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("typer")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from peer_layouts import Tensor, fsdp2_blocks, fsdp2_stock, megatron_lcm, paper_style  # noqa: E402
from planner import MODELS, peer_padding_pct, with_rows  # noqa: E402

from ragged_dtensor.granularity import Granularity  # noqa: E402
from vescale_fsdp.planner import plan_group  # noqa: E402
from vescale_fsdp.shapes import ModelShapes, read_shapes  # noqa: E402
from vescale_fsdp.spec import ParamSpec  # noqa: E402

REFERENCE = list(csv.DictReader((MODELS / "reference_padding.csv").open()))


@cache
def model(name: str, rows: str) -> ModelShapes:
    return with_rows(read_shapes(str(MODELS / f"{name}.json")), rows)


@pytest.mark.parametrize("peer", ["fsdp2_even_blocks", "fsdp2_stock", "megatron_lcm"])
def test_a_closed_formula_gives_all_1000_cells_of_the_reference(peer: str) -> None:
    for row in REFERENCE:
        padding = peer_padding_pct(model(row["model"], row["rows"]), peer, int(row["num_ranks"]))
        assert padding == pytest.approx(float(row[f"{peer}_pct"]), abs=1e-4), row


def test_the_paper_style_heuristic_gives_what_another_rebuild_of_it_gave_in_98_percent_of_the_cells() -> None:
    sample = REFERENCE[::9]
    differing = [
        row
        for row in sample
        if abs(
            peer_padding_pct(model(row["model"], row["rows"]), "paper_style", int(row["num_ranks"]))
            - float(row["paper_style_pct"])
        )
        > 0.01
    ]
    assert len(differing) <= 0.02 * len(sample)


def ours(tensors: list[Tensor], num_ranks: int, unit: int) -> int:
    specs = [ParamSpec(f"p{at}", t.shape, "bfloat16", Granularity(t.granularity)) for at, t in enumerate(tensors)]
    return plan_group(specs, num_ranks, unit=unit, align=unit).share


TENSORS = [Tensor((5, 8), 16), Tensor((3,), 1)]  # blocks of two rows; the last block of five rows is short


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (fsdp2_stock, 32),  # 3 rows and 2 elements: 26, in units of 8
        (fsdp2_blocks, 40),  # 2 blocks and 2 elements: 34
        (megatron_lcm, 32),  # chunks of 16: 3 of them, the vector in the gap of the last
        (paper_style, 32),  # it tries the matrix first only
        (ours, 24),  # the vector and one block | the other three rows
    ],
)
def test_two_ranks_by_hand(layout: object, expected: int) -> None:
    assert callable(layout)
    assert layout(TENSORS, 2, 8) == expected
