"""Padding and planning time over models, rows per block and ranks, beside other systems' layouts.

    python benchmarks/planner.py                      all of benchmarks/models -> benchmarks/models/padding.csv
    python benchmarks/planner.py gpt-oss-120b         one model, to the screen
    python benchmarks/planner_report.py               the table and the chart in docs/, from that file

Rows are 1, 16, 32, 128 (as `vescale-fsdp plan --rows`), or `muon`: matrices are never cut, except embeddings and heads.
Every percentage is padding in % of the model's elements; shares and starts are multiples of 8 elements (16 bytes).
Times are CPU time.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peer_layouts import PEERS, Tensor

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.model_plan import plan_model
from vescale_fsdp.shapes import ModelShapes, read_shapes
from vescale_fsdp.spec import ParamSpec
from vescale_fsdp.wishes import grant, parse_wish

MODELS = Path(__file__).parent / "models"
RESULTS = MODELS / "padding.csv"
ROWS = ("1", "16", "32", "128", "muon")
RANKS = (1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
UNIT = 8
LANES = (1, 2, 3)
NO_MUON = ("embed", "lm_head", "wpe", "head.", "class_token", "pos_emb")

COLUMNS = (
    "model",
    "rows",
    "num_ranks",
    "any_layout_bound_pct",
    *(f"lanes_{lanes}_pct" for lanes in LANES),
    "default_pct",
    *(f"{peer}_pct" for peer in PEERS),
    *(f"lanes_{lanes}_ms" for lanes in LANES),
    "default_ms",
)


def with_rows(shapes: ModelShapes, rows: str) -> ModelShapes:
    """The model with a granularity on every parameter."""
    if rows != "muon":
        return grant(shapes, [parse_wish("rows", rows)])
    return shapes.with_groups(
        replace(group, specs=tuple(replace(spec, granularity=whole_matrix(spec)) for spec in group.specs))
        for group in shapes.groups
    )


def whole_matrix(spec: ParamSpec) -> Granularity:
    """Every matrix, and every expert's, stays on one rank; vectors and embeddings are cut between rows."""
    if len(spec.shape) < 2 or spec.fqn.startswith(NO_MUON):
        return parse_wish("rows", "1").asks(spec)
    return Granularity(max(spec.shape[1] * spec.shape[2] if len(spec.shape) == 3 else spec.numel, 1))


def measure(shapes: ModelShapes, rows: str, num_ranks: int) -> dict[str, str]:
    """One line of the results."""
    line = {"model": shapes.model, "rows": rows, "num_ranks": str(num_ranks)}
    for lanes in (None, *LANES):
        name = "default" if lanes is None else f"lanes_{lanes}"
        begin = time.process_time()
        plan = plan_model(shapes, num_ranks, max_lanes=lanes)
        line[f"{name}_ms"] = f"{1e3 * (time.process_time() - begin):.3f}"
        line[f"{name}_pct"] = f"{plan.padding_pct:.4f}"
        line["any_layout_bound_pct"] = f"{plan.bound_pct:.4f}"
    return line | {f"{name}_pct": f"{peer_padding_pct(shapes, name, num_ranks):.4f}" for name in PEERS}


def peer_padding_pct(shapes: ModelShapes, peer: str, num_ranks: int) -> float:
    stored = 0
    for group in shapes.groups:
        tensors = [Tensor(spec.shape, spec.granularity.numel) for spec in group.specs]
        stored += PEERS[peer](tensors, num_ranks, UNIT) * num_ranks * group.count
    return 100 * (stored - shapes.numel) / shapes.numel


def measure_all(models: Sequence[str], ranks: Sequence[int] = RANKS) -> Iterator[dict[str, str]]:
    for model in models:
        shapes = read_shapes(str(MODELS / f"{model}.json"))
        for rows in ROWS:
            wished = with_rows(shapes, rows)
            for num_ranks in ranks:
                yield measure(wished, rows, num_ranks)


def write(lines: Iterator[dict[str, str]], file: Path) -> None:
    with file.open("w", newline="") as out:
        table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        table.writeheader()
        for line in lines:
            table.writerow(line)
            out.flush()


def show(lines: Iterator[dict[str, str]]) -> None:
    print("  ".join(f"{name.removesuffix('_pct')[-17:]:>17}" for name in COLUMNS))
    for line in lines:
        print("  ".join(f"{line[name]:>17}" for name in COLUMNS), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        show(measure_all(sys.argv[1:]))
    else:
        write(measure_all(sorted(file.stem for file in MODELS.glob("*.json"))), RESULTS)
