"""One plan for all: every process, hash seed and order of equal calls finds the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from public_shapes import LAYERS

from ragged_dtensor.granularity import Granularity
from vescale_fsdp.planner import make_plan
from vescale_fsdp.spec import ParamSpec

ROOT = Path(__file__).parents[2]


def digests() -> list[str]:
    """Of plans that need every part of the planner: classes, dives, beams, lanes and rows."""
    plans = []
    for rows, num_ranks in ((1, 3), (1, 1000), (16, 48)):
        groups = [
            (name, [ParamSpec(n, s, "bfloat16", Granularity(rows * max(s[-1:] or (1,)))) for n, s in LAYERS[name]])
            for name in ("qwen3-30b-a3b", "vit-giant-14", "convolutions", "mamba-2.8b")
        ]
        plans.append(make_plan(groups, num_ranks, max_lanes=2).digest())
    return plans


WITHOUT_TORCH = """
import sys, types
for name in ("ragged_dtensor", "vescale_fsdp"):  # skip what the packages import: the planner alone has to do
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{sys.argv[1]}/src/{name}"]
sys.modules["torch"] = None
import test_planner_determinism
print("|".join(test_planner_determinism.digests()))
"""


@pytest.mark.subprocess
def test_three_hash_seeds_find_the_same_plans_and_need_no_torch() -> None:
    paths = os.pathsep.join([str(ROOT / "tests"), str(Path(__file__).parent)])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, str(ROOT)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "4242")
    ]
    assert {run.communicate()[0].strip() for run in runs} == {"|".join(digests())}
    assert [run.returncode for run in runs] == [0, 0, 0]


def test_names_do_not_matter_to_the_layout() -> None:
    shapes = LAYERS["vit-giant-14"]
    one = make_plan([("a", [ParamSpec(f"a.{name}", shape) for name, shape in shapes])], 48)
    two = make_plan([("b", [ParamSpec(f"b.{i}", shape) for i, (_, shape) in enumerate(shapes)])], 48)
    assert one.groups[0].layout == two.groups[0].layout
