"""A training step of each engine, in turns in the same processes: medians, quartiles, ratios to FSDP2, and predictions.

    python benchmarks/step.py --quick                      b, c6, c3: under 8 minutes on a quiet machine of two cores
    python benchmarks/step.py --json step.json             every case
    python benchmarks/step.py --machine here.json          and this machine's rates, for `vescale-fsdp simulate`
    python benchmarks/step.py --clock cpu                  what ranks compute, where the machine is not quiet

Wall times mean something only as ratios within a run; quartiles on both sides of 1 are a tie. The last column is what
docs/simulate.md's model predicts from rates measured in the same run, over what was measured. "ours, flat" steps with
`optim.flat`; "ours, all" also fuses weight gradients, reduces in place and gathers one block ahead in forward: all that
is off by default.

`--python` measures the Python cost of many small tensors instead, in one process, on a group whose collectives do
nothing; `--wrap` what wrapping GPT-OSS-120B costs over 8 and over 256 ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import wrap
from engine_models import ENGINES, SIZES, Policy, build, text, why_not
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp.shapes import from_module
from vescale_fsdp.simulate import FSDP2, OURS, Link, Machine, Workload, time_of

# case: ranks, model, policy
CASES: dict[str, tuple[int, str, Policy]] = {
    "b fp32": (2, "b", Policy()),
    "b fp32, not resharded": (2, "b", Policy(reshards=False)),
    "b bf16, reduced in bf16": (2, "b", Policy("bf16r")),
    "c6 fp32": (4, "c6", Policy()),
    "c3 fp32": (4, "c3", Policy()),
    "a fp32": (2, "a", Policy()),
    "d bf16": (2, "d", Policy("bf16")),
}
QUICK = ("b fp32", "b fp32, not resharded", "b bf16, reduced in bf16", "c6 fp32", "c3 fp32")
SIMULATED = {"ours, flat": OURS, "fsdp2": FSDP2}
PHASES = ("forward", "backward", "optimizer")
TILE = 1 << 18
"""Elements that `flat` steps together."""
MIB = 2**20
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` counts a rank's own work, kernel and gloo's threads included: a busy machine spoils it less."""

Times = dict[str, list[list[float]]]
"""Seconds of each phase, for each round, by engine."""


def clock() -> float:
    """Seconds, by the clock that `main` chose for all ranks."""
    return CLOCKS[os.environ["STEP_CLOCK"]]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cases with a bar on a step's time")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case; repeat it")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="only this engine; repeat it")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write every time to this file")
    parser.add_argument("--machine", type=Path, help="write this machine's rates to this file")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: what ranks compute, without waiting"
    )
    parser.add_argument("--python", action="store_true", help="the Python cost of a step instead")
    parser.add_argument("--wrap", action="store_true", help="the cost of wrapping a public model instead")
    options = parser.parse_args()
    # glibc keeps what is freed, as a caching allocator does: first touches would hide everything else.
    os.environ.update(MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(64 << 30))
    os.environ.update(STEP_CLOCK=options.clock)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    if options.wrap:
        return wrap.measure(options.rounds)
    if options.python:
        return mp.spawn(_python_cost, args=(max(options.rounds, 40),), nprocs=1)
    names = options.case or (list(QUICK) if options.quick else list(CASES))
    engines = [name for name in ENGINES if not options.engine or name in (*options.engine, "fsdp2", "plain")]
    report: dict[str, Any] = {}
    links: dict[int, Link] = {}
    for name in names:
        num_ranks, model, policy = CASES[name]
        for engine in engines:
            if reason := why_not(engine, policy):
                print(f"{name}: no {engine}, {reason}")
        own = [engine for engine in engines if not why_not(engine, policy)]
        found = _in_ranks(num_ranks, model, policy, own, options.rounds)
        links[num_ranks] = Link(**found["link"])
        machine = _machine(found, tuple(links.values()))
        measured = {each: found[each] for each in ("times", "link", "rates", "seconds")}
        report[name] = {"ranks": num_ranks, **measured, **_print(name, found, machine)}
    if options.machine:
        options.machine.write_text(machine.to_json())
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def _in_ranks(num_ranks: int, model: str, policy: Policy, engines: list[str], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(num_ranks, folder, model, policy, engines, rounds), nprocs=num_ranks)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return {**found, "model": model, "policy": policy, "ranks": num_ranks}


def _rank(rank: int, num_ranks: int, folder: str, model: str, policy: Policy, engines: list[str], rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    rates = Rates(num_ranks, policy, sum(param.numel() for param in build(SIZES[model], "meta").parameters()))
    wrapped = {}
    for name in engines:
        wrapped[name] = ENGINES[name](build(SIZES[model]), mesh, policy)
    for number in range(3):
        for each in wrapped.values():
            _step(*each, model, number, rank)
    gc.collect()
    gc.disable()
    times: Times = {name: [] for name in engines}
    for number in range(rounds):
        shift = number % len(engines)
        for name in engines[shift:] + engines[:shift]:
            dist.barrier()
            times[name].append(_step(*wrapped[name], model, 3 + number, rank))
        rates.measure()
    everyone: list[Times] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(everyone, times)
    found = rates.found()
    if rank == 0:
        found["times"] = {name: _slowest([each[name] for each in everyone]) for name in engines}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _step(module: Any, optimizer: Any, model: str, number: int, rank: int) -> list[float]:
    batch = text(SIZES[model], number, rank)
    start = clock()
    loss = module(batch)
    forward = clock()
    loss.backward()
    backward = clock()
    optimizer.step()
    optimizer.zero_grad()
    return [forward - start, backward - forward, clock() - backward]


def _slowest(ranks: list[list[list[float]]]) -> list[list[float]]:
    """The phases of the rank whose step took longest, for each round."""
    return [max(phases, key=sum) for phases in zip(*ranks, strict=True)]


class Rates:
    """What this machine moves and updates per second, measured once per round, under the load that engines have."""

    def __init__(self, num_ranks: int, policy: Policy, numel: int) -> None:
        reduce, compute = policy.reduce_dtype, torch.float32 if policy.precision == "fp32" else torch.bfloat16
        self._num_ranks = num_ranks
        # Written once: reads of memory that never was go to one page of zeros.
        given, taken = torch.ones(16 * MIB), torch.ones(16 * MIB)
        cast = torch.ones(16 * MIB, dtype=compute if compute != torch.float32 else torch.bfloat16)
        self._runs: dict[str, Callable[[], object]] = {
            "copy": lambda: taken.copy_(given),
            "cast": lambda: cast.copy_(given),
            "update": _update(numel // num_ranks, 8),
            "tiled": _update(numel // num_ranks, max(numel // num_ranks // TILE, 1), tiled=True),
        }
        for kind, numel_ in (("small", MIB // 16), ("large", 8 * MIB)):
            whole = torch.ones(numel_, dtype=compute)
            sums = torch.ones(numel_, dtype=reduce)
            self._runs["gather " + kind] = _gather(whole, num_ranks)
            self._runs["reduce " + kind] = _reduce(sums, num_ranks)
        self._cast_bytes = 16 * MIB * (4 + cast.itemsize)
        self._whole_bytes = (MIB // 16 * compute.itemsize, 8 * MIB * compute.itemsize)
        self._sum_bytes = (MIB // 16 * reduce.itemsize, 8 * MIB * reduce.itemsize)
        self._numel = numel // num_ranks
        self._seconds: dict[str, list[float]] = {name: [] for name in self._runs}

    def measure(self) -> None:
        for name, run in self._runs.items():
            dist.barrier()
            start = clock()
            run()
            self._seconds[name].append(clock() - start)

    def found(self) -> dict[str, Any]:
        """Medians, of the slowest rank in each round."""
        everyone: list[dict[str, list[float]]] = [{} for _ in range(self._num_ranks)]
        dist.all_gather_object(everyone, self._seconds)
        seconds = {
            name: statistics.median(map(max, zip(*(each[name] for each in everyone), strict=True)))
            for name in self._runs
        }
        latency, gather = _line_through(self._whole_bytes, seconds["gather small"], seconds["gather large"])
        reduce_latency, reduce = _line_through(self._sum_bytes, seconds["reduce small"], seconds["reduce large"])
        share, hops = (self._num_ranks - 1) / self._num_ranks, math.log2(self._num_ranks)
        return {
            "link": {
                "ranks": self._num_ranks,
                "latency_s": latency / hops,
                "reduce_latency_s": reduce_latency / hops,
                "gather_bandwidth": share / gather,
                "reduce_bandwidth": share / reduce,
            },
            "rates": {
                "copy_bandwidth": 2 * 64 * MIB / seconds["copy"],
                "cast_bandwidth": self._cast_bytes / seconds["cast"],
                "updates_per_s": self._numel / seconds["update"],
                "tiled_updates_per_s": self._numel / seconds["tiled"],
            },
            "seconds": seconds,
        }


def _line_through(nbytes: tuple[int, int], small: float, large: float) -> tuple[float, float]:
    """Seconds at no bytes, and per byte."""
    slope = (large - small) / (nbytes[1] - nbytes[0])
    return max(small - slope * nbytes[0], 0.0), slope


def _gather(whole: torch.Tensor, num_ranks: int) -> Callable[[], object]:
    part = torch.ones_like(whole.narrow(0, 0, whole.numel() // num_ranks))
    return lambda: dist.all_gather_into_tensor(whole, part)


def _reduce(whole: torch.Tensor, num_ranks: int) -> Callable[[], object]:
    part = torch.ones_like(whole.narrow(0, 0, whole.numel() // num_ranks))
    return lambda: dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)


def _update(numel: int, tensors: int, *, tiled: bool = False) -> Callable[[], object]:
    """A step of AdamW in float32 over so many elements: over all at once, or over one tensor after another."""
    params = [torch.ones(max(numel // tensors, 1)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    groups = [{"params": [param]} for param in params] if tiled else [{"params": params}]
    return torch.optim.AdamW(groups, lr=1e-3, foreach=True).step


def _machine(found: dict[str, Any], links: tuple[Link, ...]) -> Machine:
    """This machine's rates; computation is the plain model's, so that only its ratio to the rest is a prediction."""
    workload = _workload(found)
    forward, backward, _ = (statistics.median(each) for each in zip(*found["times"]["plain"], strict=True))
    flops = workload.model_flops / (forward + backward)
    return Machine("this machine", flops, flops, memory_bytes=2**34, links=links, overlaps=False, **found["rates"])


def _workload(found: dict[str, Any]) -> Workload:
    size, policy = SIZES[found["model"]], found["policy"]
    dtype = "float32" if policy.precision == "fp32" else "bfloat16"
    reduce = str(policy.reduce_dtype).removeprefix("torch.")
    shapes = from_module(build(size, "meta"), model=found["model"])
    return Workload(shapes, size.length, compute_dtype=dtype, reduce_dtype=reduce, checkpointed=False)


def _print(name: str, found: dict[str, Any], machine: Machine) -> dict[str, Any]:
    times = {engine: [sum(phases) for phases in rounds] for engine, rounds in found["times"].items()}
    print(f"\n{name}, {found['ranks']} ranks: milliseconds", flush=True)
    print(_cells("engine", "step", "quartiles", "/ fsdp2", "quartiles", *PHASES, "predicted"))
    rows = {}
    for engine, own in times.items():
        ratios = [mine / theirs for mine, theirs in zip(own, times["fsdp2"], strict=True)]
        phases = [statistics.median(each) for each in zip(*found["times"][engine], strict=True)]
        row: dict[str, Any] = {"step_s": _quartiles(own), "ratio": _quartiles(ratios)}
        row["phases_s"] = dict(zip(PHASES, phases, strict=True))
        row["predicted"] = _predicted(engine, found, machine, row["step_s"][1])
        rows[engine] = row
        print(_line(engine, row), flush=True)
    return {"engines": rows}


def _line(engine: str, row: dict[str, Any]) -> str:
    low, middle, high = (1e3 * value for value in row["step_s"])
    first, ratio, last = row["ratio"]
    phases = [f"{1e3 * value:.1f}" for value in row["phases_s"].values()]
    step, ratios = (f"{middle:.1f}", f"{low:.1f}-{high:.1f}"), (f"{ratio:.3f}", f"{first:.2f}-{last:.2f}")
    return _cells(engine, *step, *ratios, *phases, f"{row['predicted']:.2f}" if row["predicted"] else "")


def _cells(engine: str, *cells: str) -> str:
    return f"{engine:<12}" + "".join(f"{cell:>14}" for cell in cells)


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _predicted(engine: str, found: dict[str, Any], machine: Machine, measured: float) -> float | None:
    """The model's step over the measured one."""
    if engine not in SIMULATED or not found["policy"].reshards:
        return None
    workload, num_ranks = _workload(found), found["ranks"]
    costs = SIMULATED[engine].costs(workload, num_ranks)
    return time_of(SIMULATED[engine], workload, machine, costs, num_ranks).total / measured


def _python_cost(rank: int, rounds: int) -> None:
    """Process time of model a above the plain model's, on rank 0 of 8; gathers and reductions do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    engines = ("fsdp2", "ours", "ours, flat", "plain")
    wrapped = {name: ENGINES[name](build(SIZES["a"]), mesh, Policy()) for name in engines}
    cost: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(rounds + 5):
        for name in engines:
            module, optimizer = wrapped[name]
            begin = time.process_time()
            module(text(SIZES["a"], number, 0)).backward()
            middle = time.process_time()
            optimizer.step()
            cost[name].append((middle - begin, time.process_time() - middle))
            optimizer.zero_grad()
    dist.destroy_process_group()
    above = {
        name: [mine[0] - base[0] for mine, base in zip(own, cost["plain"], strict=True)][5:]
        for name, own in cost.items()
    }
    steps = {name: [step for _, step in own][5:] for name, own in cost.items()}
    print(f"model a, rank 0 of 8: milliseconds of CPU, medians of {rounds} rounds; ratios within a round, quartiles")
    print(_cells("engine", "fwd+bwd-plain", "/ fsdp2", "quartiles", "optimizer", "/ fsdp2", "quartiles"))
    for name in engines[:-1]:
        cells = []
        for taken in (above, steps):
            low, middle, high = _quartiles([a / b for a, b in zip(taken[name], taken["fsdp2"], strict=True)])
            cells += [f"{1e3 * statistics.median(taken[name]):.2f}", f"{middle:.3f}", f"{low:.2f}-{high:.2f}"]
        print(_cells(name, *cells))


if __name__ == "__main__":
    main()
