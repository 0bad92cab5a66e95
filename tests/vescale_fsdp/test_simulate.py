"""Simulated steps: worked numbers, the published GPT-OSS-120B case, what the command prints and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from vescale_fsdp.cli.app import app
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.shapes import read_shapes
from vescale_fsdp.simulate import (
    FSDP2,
    MACHINES,
    OURS,
    Link,
    Machine,
    Memory,
    Moves,
    Workload,
    memory_of,
    read_machine,
    time_of,
)

ROOT = Path(__file__).parents[2]
GPT_OSS = ROOT / "benchmarks" / "models" / "gpt-oss-120b.json"
GIB = 2**30

# One unit each: a byte takes a second on the wire, an operation a second, a copied byte 1/10 s, an element 1/4 s.
SLOW = Machine("slow", 1.0, 1.0, 10.0, 4.0, 10**9, (Link(1024, 0.0, 1.0, 1.0),), overlaps=False)


def tiny(tmp_path: Path, rows: int = 4) -> Path:
    value = {
        "version": 1,
        "model": "tiny",
        "groups": [{"count": 2, "params": [["layers.0.w", [rows, 4]]]}],
    }
    (tmp_path / "tiny.json").write_text(json.dumps(value))
    return tmp_path / "tiny.json"


def memory(engine: Any, num_ranks: int) -> Memory:
    workload = Workload(read_shapes(str(GPT_OSS)), 1)
    return memory_of(engine, workload, engine.costs(workload, num_ranks))


def test_a_step_without_overlap_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    workload = Workload(
        read_shapes(str(tiny(tmp_path))), 1, compute_dtype="float32", reduce_dtype="float32", checkpointed=False
    )
    time = time_of(OURS, workload, SLOW, OURS.costs(workload, 2), 2)
    # Two layers of 16 elements: 2 * 16 operations forward and twice that backward; 64 bytes gathered twice and reduced
    # once, half of it on the wire; each gradient of 64 bytes read and written; 16 elements stepped.
    assert (time.compute, time.exposed_gather, time.exposed_reduce) == (2 * 3 * 32, 2 * 2 * 32, 2 * 32)
    assert time.copies == pytest.approx(2 * 128 / 10)
    assert time.optimizer == 16 / 4
    assert time.mfu == pytest.approx(192 / time.total)


def test_fsdp2_copies_each_gather_in_and_out_and_pads_rows(tmp_path: Path) -> None:
    workload = Workload(read_shapes(str(tiny(tmp_path, rows=5))), 1, compute_dtype="float32", checkpointed=False)
    (cost,) = FSDP2.costs(workload, 4)
    # 5 rows over 4 ranks: 2 each, 8 rows of 4 elements in all.
    assert (cost.whole, cost.share, cost.numel) == (32, 8, 20)
    assert cost.gather_moves == Moves(copied=2 * 4 * (8 + 32))
    assert cost.reduce_moves == Moves(copied=4 * (20 + 32))
    assert OURS.costs(workload, 4)[0].gather_moves == Moves()


def test_casts_are_told_from_copies(tmp_path: Path) -> None:
    shapes = read_shapes(str(tiny(tmp_path, rows=5)))
    (ours,) = OURS.costs(Workload(shapes, 1, reduce_dtype="bfloat16"), 4)
    (theirs,) = FSDP2.costs(Workload(shapes, 1, reduce_dtype="bfloat16"), 4)
    # 20 elements over 4 ranks are shares of 8, of 16 bytes in bfloat16. Ours casts its share before the gather and what
    # was reduced after it; gradients are copied in bfloat16.
    assert ours.gather_moves == Moves(cast=8 * (4 + 2))
    assert ours.reduce_moves == Moves(copied=20 * (2 + 2), cast=8 * (2 + 4))
    assert theirs.gather_moves == Moves(copied=2 * 2 * (8 + 32), cast=8 * (4 + 2))
    assert theirs.reduce_moves == Moves(copied=20 * 2 + 32 * 2, cast=8 * (2 + 4))
    # Reduced in float32, gradients are cast on the way into the buffer, and nothing is cast afterwards.
    (ours,) = OURS.costs(Workload(shapes, 1), 4)
    assert ours.reduce_moves == Moves(cast=20 * (2 + 4))


def test_a_reduction_may_have_another_latency_than_a_gather() -> None:
    link = Link(1024, 1.0, 4.0, 8.0)
    machine = replace(SLOW, links=(link,))
    # Three hops among 8 ranks; 7/8 of 64 bytes at 4 and at 8 bytes a second.
    assert (machine.gather_s(64, 8), machine.reduce_s(64, 8)) == (3 * 1 + 56 / 4, 3 * 1 + 56 / 8)
    machine = replace(SLOW, links=(replace(link, reduce_latency_s=2.0),))
    assert (machine.gather_s(64, 8), machine.reduce_s(64, 8)) == (3 * 1 + 56 / 4, 3 * 2 + 56 / 8)
    with pytest.raises(VescaleError, match="reduce_latency_s is a time >= 0, got -1"):
        replace(link, reduce_latency_s=-1)


def test_a_machine_may_cast_at_another_rate_and_update_faster_in_tiles() -> None:
    moves = Moves(copied=100) + Moves(cast=50)
    assert SLOW.move_s(moves) == pytest.approx(150 / 10)
    assert replace(SLOW, cast_bandwidth=5.0).move_s(moves) == pytest.approx(100 / 10 + 50 / 5)
    assert SLOW.update_s(16, in_tiles=True) == SLOW.update_s(16, in_tiles=False) == 16 / 4
    tiled = replace(SLOW, tiled_updates_per_s=8.0)
    assert (tiled.update_s(16, in_tiles=True), tiled.update_s(16, in_tiles=False)) == (16 / 8, 16 / 4)


def test_our_optimizer_steps_in_tiles_and_fsdp2s_does_not(tmp_path: Path) -> None:
    workload = Workload(read_shapes(str(tiny(tmp_path))), 1, compute_dtype="float32", checkpointed=False)
    tiled = replace(SLOW, tiled_updates_per_s=8.0)
    times = [time_of(engine, workload, tiled, engine.costs(workload, 2), 2) for engine in (OURS, FSDP2)]
    assert [time.optimizer for time in times] == [16 / 8, 16 / 4]


def test_with_overlap_a_gather_hides_behind_the_computation_before_it(tmp_path: Path) -> None:
    workload = Workload(read_shapes(str(tiny(tmp_path))), 1, compute_dtype="float32", checkpointed=False)
    fast = replace(SLOW, links=(Link(1024, 0.0, 4.0, 4.0),), copy_bandwidth=1e12, overlaps=True)
    time = time_of(OURS, workload, fast, OURS.costs(workload, 2), 2)
    # 8 s for each collective, 32 s for each forward: each pass shows its first gather, and the step its
    # last reduction.
    assert time.exposed_gather == pytest.approx(8 + 8)
    assert time.exposed_reduce == pytest.approx(8)


def test_fsdp2_fits_gpt_oss_120b_on_128_ranks_of_80_gb_and_not_on_256() -> None:
    h800 = MACHINES["h800"]
    assert [memory(FSDP2, ranks).fits(h800) for ranks in (64, 128, 256, 512)] == [True, True, False, False]
    assert all(memory(OURS, ranks).fits(h800) for ranks in (64, 128, 256, 512))


def test_the_page_says_what_both_engines_hold() -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    for name, engine in (("FSDP2, peak of a rank without activations", FSDP2), ("this engine", OURS)):
        few, many = (f"{memory(engine, ranks).peak / GIB:.1f} GiB" for ranks in (128, 256))
        assert f"| {name} | {few} | {many} |" in page


def test_twice_the_ranks_leave_fsdp2_the_same_shares_of_experts_and_twice_the_gathered_bytes() -> None:
    workload = Workload(read_shapes(str(GPT_OSS)), 1)
    few, many = (FSDP2.costs(workload, ranks)[-1] for ranks in (128, 256))
    experts = 2 * 2880 * 2880 + 2880 * 2880 + 2 * 2880 + 2880  # of one expert: two matrices, two biases
    assert few.share >= experts
    assert many.share >= experts
    assert 128 * experts / few.whole > 0.98
    assert many.whole / few.whole == pytest.approx(2, abs=0.02)


def test_padding_is_what_stops_it() -> None:
    assert memory(FSDP2, 256).peak / memory(FSDP2, 128).peak == pytest.approx(1.51, abs=0.01)
    assert memory(OURS, 256).peak / memory(FSDP2, 256).peak == pytest.approx(0.568, abs=0.005)
    assert memory(OURS, 256).peak / memory(OURS, 128).peak == pytest.approx(0.856, abs=0.005)


def test_the_published_times_of_one_layer_come_out() -> None:
    h800, layer = MACHINES["h800"], 3_238_000_000
    assert h800.gather_s(2 * layer, 64) == pytest.approx(43.7e-3, rel=0.03)
    assert h800.reduce_s(4 * layer, 64) == pytest.approx(94.2e-3, rel=0.03)


def test_a_machine_survives_json(tmp_path: Path) -> None:
    link = Link(8, 1.0, 2.0, 3.0, reduce_latency_s=0.5)
    for machine in (MACHINES["h800"], replace(SLOW, links=(link,), cast_bandwidth=5.0, tiled_updates_per_s=8.0)):
        (tmp_path / "m.json").write_text(machine.to_json())
        assert read_machine(str(tmp_path / "m.json")) == machine


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "a machine is JSON"),
        ("[]", "expected a machine of version 1"),
        ('{"version": 1}', "links: expected a list, got NoneType"),
        ('{"version": 1, "links": [{"ranks": 8}]}', r"links\[0\]: missing 3 required"),
        (
            '{"version": 1, "links": [{"ranks": 0, "latency_s": 0, "gather_bandwidth": 1, "reduce_bandwidth": 1}]}',
            "ranks",
        ),
        ('{"version": 1, "links": [], "color": 1}', "unknown entry 'color'"),
        ('{"version": 1, "links": [], "flops": "many"}', "flops is a number, got 'many'"),
        ('{"version": 1, "links": [], "cast_bandwidth": "many"}', "cast_bandwidth is a number, got 'many'"),
    ],
)
def test_a_machine_that_is_none_is_refused_by_entry(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(VescaleError, match=error):
        read_machine(str(tmp_path / "m.json"))


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, args)])


def test_the_command_prints_and_writes_every_point(tmp_path: Path) -> None:
    result = run(
        tiny(tmp_path), "--ranks", 8, "--ranks", 64, "--json", tmp_path / "s.json", "--png", tmp_path / "s.png"
    )
    assert result.exit_code == 0, result.output
    assert "vescale-fsdp fits at each of these numbers of ranks." in result.output
    value = json.loads((tmp_path / "s.json").read_text())
    assert [(point["engine"], point["num_ranks"]) for point in value["weak"]] == [
        ("vescale-fsdp", 8),
        ("vescale-fsdp", 64),
        ("fsdp2", 8),
        ("fsdp2", 64),
    ]
    assert [point["tokens"] for point in value["strong"]] == [8192, 1024] * 2
    assert [point["growth"] for point in value["model_sizes"]] == [1, 2, 4, 8] * 2
    assert all(point["parameters"] == 32 * point["growth"] for point in value["model_sizes"])
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--ranks", "0"], "--ranks: expected a whole number >= 1, got 0"),
        (["--tokens", "0"], "--tokens: expected a whole number >= 1, got 0"),
        (["--machine", "abacus"], "abacus: no such machine or file. Machines: h800"),
        (["--active", "w"], "--active: expected PATTERN=K/N, such as '*experts*=4/128', got 'w'"),
        (["--active", "*gate*=1/2"], "active *gate*: no parameter of tiny has such a name"),
        (["--active", "*w=3/2"], "active *w: expected a share between 0 and 1, got 1.5"),
        (["--compute-dtype", "int8"], "--compute-dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        (["--activation-gib", "-1"], "--activation-gib: expected a number >= 0, got -1.0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, args: list[str], error: str) -> None:
    result = run(tiny(tmp_path), *args)
    assert (result.exit_code, result.stderr.strip()) == (2, f"Error: {error}")
