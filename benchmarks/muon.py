"""Muon's step: ours on fully_shard, torch.optim.Muon on FSDP2, and gathering every matrix on every rank. One run.

    python benchmarks/muon.py [--json FILE] [--width 256] [--layers 6] [--rounds 9] [--quick]

The same weights and gradients for all three; steps take turns, so that a busy machine hits all alike. On CPU, gloo and
one thread per rank; every system iterates in bfloat16, as torch.optim.Muon does. What a step moves is counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import Muon
from vescale_fsdp.optim.orthogonalize import adjusted_lr, muon_update

Figures = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one layer of width 64, two rounds: does it run at all?")
    options = parser.parse_args()
    if options.quick:
        options.width, options.layers, options.rounds = 64, 1, 2
    report = {}
    for num_ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(num_ranks, folder, options), nprocs=num_ranks)
            report[f"{num_ranks} ranks"] = json.loads((Path(folder) / "figures.json").read_text())
    for ranks, figures in report.items():
        _print(ranks, figures)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


COLUMNS = {
    "step_ms": "step ms",
    "best_ms": "best ms",
    "ratio": "ours/it",
    "collectives": "collectives",
    "sent_mb": "MB sent",
    "matrices": "matrices",
}


def _print(ranks: str, figures: Figures) -> None:
    """Step times are of the slowest rank; collectives, bytes and matrices of the rank with the most."""
    print(f"\n{ranks:<34}" + "".join(f"{title:>13}" for title in COLUMNS.values()))
    for name, row in figures.items():
        shown = {**row, "ratio": figures["ours"]["step_ms"] / row["step_ms"]}
        print(f"{name:<34}" + "".join(f"{shown[key]:>13.3f}" for key in COLUMNS))


class Block(nn.Module):
    """The matrices of one transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


def model(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


class GatherEverything(torch.optim.Optimizer):
    """What is written by hand first: every rank gathers every gradient, and orthogonalizes every matrix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros(param.shape))
            update, new = muon_update(param.grad.full_tensor(), momentum)
            momentum.copy_(new)
            rate = adjusted_lr(1e-3, None, tuple(param.shape))
            chunks = (rate * update).chunk(dist.get_world_size())
            param.to_local().mul_(1 - 1e-3 * 0.1).sub_(chunks[dist.get_rank()])


def _rank(rank: int, num_ranks: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    systems = {
        "ours": _ours(options),
        "torch.optim.Muon on FSDP2": _on_fsdp2(options, torch.optim.Muon),
        "gather everything, on FSDP2": _on_fsdp2(options, GatherEverything),
    }
    _check_that_they_agree(systems)
    figures = {name: _counts(*system) for name, system in systems.items()}
    times = _times({name: optimizer.step for name, (_, optimizer) in systems.items()}, options.rounds)
    for name, row in figures.items():
        row["step_ms"], row["best_ms"] = statistics.median(times[name]), min(times[name])
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _ours(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = model(options.width, options.layers)
    for block in module:
        fully_shard(block)
    fully_shard(module)
    return _with_gradients(module), Muon(module.named_parameters())


def _on_fsdp2(options: argparse.Namespace, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = model(options.width, options.layers)
    for block in module:
        fsdp2(block)
    fsdp2(module)
    return _with_gradients(module), optimizer(module.parameters())


def _with_gradients(module: nn.Module) -> nn.Module:
    """Every parameter's gradient is a fixed function of its own values, cut as it is."""
    for param in module.parameters():
        assert isinstance(param, DTensor)
        grad = torch.empty_like(param)
        grad.to_local().copy_(torch.sin(1e4 * param.detach().to_local()))
        param.grad = grad
    return module


def _check_that_they_agree(systems: dict[str, tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    for _, optimizer in systems.values():
        optimizer.step()
    full = {name: [p.full_tensor() for p in module.parameters()] for name, (module, _) in systems.items()}  # type: ignore[attr-defined]
    for name, params in full.items():
        for ours, theirs in zip(full["ours"], params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Collectives and the bytes that a rank hands to them, ours (called directly) and functional ones."""
    found = {"collectives": 0.0, "nbytes": 0.0}
    original = dist.all_to_all_single

    def count(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        found["collectives"] += 1
        found["nbytes"] += input.nbytes
        return original(output, input, *args, **kwargs)

    class Bytes(CommDebugMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
                found["collectives"] += 1
                found["nbytes"] += args[0].nbytes
            return super().__torch_dispatch__(func, types, args, kwargs)

    dist.all_to_all_single = count
    try:
        with Bytes():
            yield found
    finally:
        dist.all_to_all_single = original


def _counts(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Of the rank with the most."""
    num_matrices = len(list(module.parameters()))
    if isinstance(optimizer, Muon):
        owners = [owner for borrowed in optimizer.borrowed() for owner in borrowed.lender.terms.owners]
        num_matrices = owners.count(dist.get_rank())
    with counted() as found:
        optimizer.step()
    most = torch.tensor([found["collectives"], found["nbytes"] / 1e6, num_matrices])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(("collectives", "sent_mb", "matrices"), most.tolist(), strict=True))


def _times(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank, round by round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


if __name__ == "__main__":
    main()
