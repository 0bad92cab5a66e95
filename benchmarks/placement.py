"""What a ragged placement costs: an op against the same op on Shard(0), a movement against the bare collective.

    python benchmarks/placement.py [--only ops ranks movements] [--json FILE] [--mib 16 32]

Ops run on one process of a fake 8-rank group (and of a 16,384-rank one), cases interleaved, medians of many rounds, in
CPU time of this process alone. Norms are agreed on at once, where Shard(0) leaves them to be reduced; `clip_grad_norm_`
compares like with like. Movements run on 2 gloo ranks, 16 MiB and more per tensor, interleaved with the bare collective
of as many bytes, by the clock; the fastest of many rounds counts. Each line: ours, the other, ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ragged_dtensor import RaggedShard, Units

Row = tuple[str, float, float]

MiB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--mib", nargs="+", type=int, default=[16, 32], help="sizes of the tensors that move (16 32)")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="sections to run (all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    SECTIONS["movements"] = lambda: movement_costs([mib * MiB for mib in arguments.mib])
    report = {title: SECTIONS[title]() for title in arguments.only or SECTIONS}
    for title, rows in report.items():
        print(f"\n{title}")
        for name, ours, theirs in rows:
            print(f"  {name:<44}{ours:>10.2f}{theirs:>10.2f}   x{ours / theirs:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def interleaved(
    cases: dict[str, Callable[[], object]],
    rounds: int,
    calls: int,
    pick: Callable[[list[float]], float] = statistics.median,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Seconds per call of each case, taking turns so that a busy machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    for _ in range(rounds):
        for name, case in cases.items():
            start = clock()
            for _ in range(calls):
                case()
            times[name].append((clock() - start) / calls)
    return {name: pick(values) for name, values in times.items()}


# --- ops


def op_costs() -> list[Row]:
    """CPU microseconds per call over 32 tensors of 8 x 64 local elements: the cost is Python and C++, not sums."""
    with fake_ranks(8) as mesh:
        ragged = [tensors(mesh, RaggedShard((0,), (1, 2, 1, 1, 1, 0, 1, 1)), 8) for _ in range(2)]
        shard = [tensors(mesh, Shard(0), 8) for _ in range(2)]
        rows = []
        for name, make in OPS.items():
            cases = {"ragged": make(*ragged), "shard": make(*shard)}
            found = interleaved(cases, rounds=60, calls=20)
            rows.append((name, found["ragged"] * 1e6, found["shard"] * 1e6))
        return rows


def rank_costs() -> list[Row]:
    rows = []
    found: dict[int, dict[str, float]] = {}
    for num_ranks in (8, 16_384):
        with fake_ranks(num_ranks) as mesh:
            units = Units.from_runs(((1, 1), (2, num_ranks - 2), (1, 1)))
            one, other = (RaggedShard((0,), Units.from_runs(units.runs)) for _ in range(2))
            x, y = (tensors(mesh, placement, num_ranks, count=1)[0] for placement in (one, other))
            cases: dict[str, Callable[[], object]] = {
                "placement == placement": lambda one=one, other=other: one == other,
                "hash(placement)": lambda one=one: hash(one),
                "x + y": lambda x=x, y=y: x + y,
                "x.redistribute to the same placement": lambda x=x, p=other: x.redistribute(placements=[p]),
            }
            found[num_ranks] = interleaved(cases, rounds=60, calls=50)
    for name in found[8]:
        rows.append((name, found[16_384][name] * 1e6, found[8][name] * 1e6))
    return rows


class fake_ranks:  # noqa: N801  (reads as a verb in a with statement)
    """A process group of which the other ranks do not exist."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def __enter__(self) -> dist.device_mesh.DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=self.num_ranks)
        return init_device_mesh("cpu", (self.num_ranks,))

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def tensors(
    mesh: dist.device_mesh.DeviceMesh, placement: RaggedShard | Shard, num_ranks: int, count: int = 32
) -> list[DTensor]:
    """Tensors of which this rank, rank 1, holds 8 rows."""
    rows = 4 * placement.local_units.total if isinstance(placement, RaggedShard) else 8 * num_ranks
    shape = torch.Size((rows, 64))
    return [DTensor.from_local(torch.rand(8, 64), mesh, [placement], shape=shape, stride=(64, 1)) for _ in range(count)]


def _adamw(parameters: list[DTensor], gradients: list[DTensor], **options: bool) -> Callable[[], object]:
    leaves = [torch.nn.Parameter(p.clone()) for p in parameters]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    return torch.optim.AdamW(leaves, lr=1e-3, **options).step


def _clip(parameters: list[DTensor], gradients: list[DTensor]) -> Callable[[], object]:
    leaves = [torch.nn.Parameter(p.clone()) for p in parameters]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient.clone()
    return lambda: torch.nn.utils.clip_grad_norm_(leaves, 1.0)


OPS: dict[str, Callable[[list[DTensor], list[DTensor]], Callable[[], object]]] = {
    "x + y": lambda xs, ys: lambda: xs[0] + ys[0],
    "x * 2": lambda xs, ys: lambda: xs[0] * 2,
    "x.mul_(y)": lambda xs, ys: lambda: xs[0].mul_(ys[0]),
    "foreach add_, 32 tensors": lambda xs, ys: lambda: torch._foreach_add_(xs, ys, alpha=1e-6),
    "x.sum(1)": lambda xs, ys: lambda: xs[0].sum(1),
    "x.view(-1)": lambda xs, ys: lambda: xs[0].view(-1),
    "clip_grad_norm_, 32 tensors": lambda xs, ys: _clip(xs, ys),
    "AdamW(foreach=True).step, 32 tensors": lambda xs, ys: _adamw(xs, ys, foreach=True),
    "AdamW(fused=True).step, 32 tensors": lambda xs, ys: _adamw(xs, ys, fused=True),
}


# --- movements


def movement_costs(sizes: Sequence[int] = (16 * MiB, 32 * MiB), num_ranks: int = 2) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rows.json")
        mp.spawn(_move, args=(num_ranks, list(sizes), folder, out), nprocs=num_ranks)
        return [(name, ours, theirs) for name, ours, theirs in json.loads(Path(out).read_text())]


def _move(rank: int, num_ranks: int, sizes: list[int], folder: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    rows = []
    for nbytes in sizes:
        for name, movement, collective in _movements(mesh, rank, num_ranks, nbytes // 4):
            cases = {"ours": _synchronous(movement), "bare": _synchronous(collective)}
            found = interleaved(cases, rounds=31, calls=1, pick=min, clock=time.perf_counter)
            rows.append((f"{name}, {nbytes // MiB} MiB", found["ours"] * 1e3, found["bare"] * 1e3))
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _synchronous(case: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        case()
        dist.barrier()

    return run


def _movements(
    mesh: dist.device_mesh.DeviceMesh, rank: int, num_ranks: int, numel: int
) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Our movement beside the bare collective of as many bytes; both leave their result in new memory."""
    equal = RaggedShard((0,), (1,) * num_ranks)
    uneven = RaggedShard((0,), (3, 5))
    turned = RaggedShard((0,), (5, 3))
    root = RaggedShard((0,), (0, 1))
    share = numel // num_ranks
    whole, part = torch.rand(numel), torch.rand(share)

    def ragged(placement: RaggedShard) -> DTensor:
        local = torch.rand(numel // placement.local_units.total * placement.local_units[rank])
        return DTensor.from_local(local, mesh, [placement], shape=torch.Size((numel,)), stride=(1,))

    def move(x: DTensor, target: RaggedShard | Replicate) -> Callable[[], object]:
        return lambda: x.redistribute(placements=[target])

    def exchange(source: RaggedShard, target: RaggedShard) -> Callable[[], object]:
        unit, (have, want) = (
            numel // 16,
            ([n * 16 // p.local_units.total for n in p.local_units] for p in (source, target)),
        )
        sent, received = ([unit * n for n in row] for row in _transfers(have, want, rank))
        buffer = torch.rand(sum(sent))
        return lambda: dist.all_to_all_single(buffer.new_empty(sum(received)), buffer, received, sent)

    def gather(part: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.all_gather_into_tensor(part.new_empty(part.numel() * num_ranks), part)

    def reduce_scatter(source: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.reduce_scatter_tensor(source.new_empty(source.numel() // num_ranks), source)

    partial = DTensor.from_local(whole, mesh, [Partial()])
    return [
        ("equal -> Replicate / all-gather", move(ragged(equal), Replicate()), gather(part)),
        ("uneven -> Replicate / all-gather", move(ragged(uneven), Replicate()), gather(part)),
        ("root -> Replicate / broadcast", move(ragged(root), Replicate()), lambda: dist.broadcast(whole.clone(), 1)),
        ("uneven -> uneven / all-to-all", move(ragged(uneven), turned), exchange(uneven, turned)),
        ("root -> uneven / all-to-all", move(ragged(root), uneven), exchange(root, uneven)),
        ("Partial -> equal / reduce-scatter", move(partial, equal), reduce_scatter(whole)),
        ("Partial -> uneven / reduce-scatter", move(partial, uneven), reduce_scatter(whole)),
    ]


def _transfers(have: list[int], want: list[int], rank: int) -> tuple[list[int], list[int]]:
    """Units that `rank` sends to and receives from each rank, when all hold consecutive runs."""

    def common(i: int, j: int) -> int:
        begin = max(sum(have[:i]), sum(want[:j]))
        end = min(sum(have[: i + 1]), sum(want[: j + 1]))
        return max(0, end - begin)

    ranks = range(len(have))
    return [common(rank, j) for j in ranks], [common(i, rank) for i in ranks]


# CPU microseconds, ragged and Shard(0); the same, 16,384 ranks and 8; milliseconds, ours and the bare collective.
SECTIONS: dict[str, Callable[[], list[Row]]] = {"ops": op_costs, "ranks": rank_costs, "movements": movement_costs}


if __name__ == "__main__":
    main()
