"""What wrapping costs: plans, shards, hooks of a public model on the meta device, over ranks that do not exist.

    python benchmarks/wrap.py                 GPT-OSS-120B over 8 and 256 ranks, ours and FSDP2, in turns

One process stands for rank 0 of 256, on a group whose collectives do nothing, and wraps a new model each time: over all
ranks, or over 8 of them. The first time, nothing is remembered from an earlier model; medians are of the others.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from vescale_fsdp import fully_shard
from vescale_fsdp.shapes import ModelShapes, read_shapes

MODEL = Path(__file__).parent / "models" / "gpt-oss-120b.json"
MANY, FEW = 256, 8
PAIRS: dict[str, tuple[Callable[..., Any], int]] = {
    f"fsdp2, {MANY} ranks": (fsdp2, MANY),
    f"ours, {MANY} ranks": (fully_shard, MANY),
    f"ours, {FEW} ranks": (fully_shard, FEW),
    f"fsdp2, {FEW} ranks": (fsdp2, FEW),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    measure(parser.parse_args().rounds)


def measure(rounds: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MANY)
    meshes = {
        MANY: init_device_mesh("cpu", (MANY,)),
        FEW: init_device_mesh("cpu", (MANY // FEW, FEW), mesh_dim_names=("rest", "few"))["few"],
    }
    shapes = read_shapes(str(MODEL))
    seconds: dict[str, list[float]] = {name: [] for name in PAIRS}
    for number in range(rounds + 1):
        names = list(PAIRS)[number % len(PAIRS) :] + list(PAIRS)[: number % len(PAIRS)]
        for name in names:
            shard, num_ranks = PAIRS[name]
            seconds[name].append(wrap(shapes, shard, meshes[num_ranks]))
    dist.destroy_process_group()
    print(f"{shapes.model}, wrapped on rank 0: seconds of CPU, the first and the median of {rounds} more")
    for name, own in seconds.items():
        print(f"{name:<16}{own[0]:>8.2f}{statistics.median(own[1:]):>8.2f}")
    _print_ratio("ours / fsdp2", seconds[f"ours, {MANY} ranks"], seconds[f"fsdp2, {MANY} ranks"])
    for engine in ("ours", "fsdp2"):
        _print_ratio(
            f"{engine}, {MANY} / {FEW} ranks", seconds[f"{engine}, {MANY} ranks"], seconds[f"{engine}, {FEW} ranks"]
        )


def _print_ratio(name: str, one: list[float], two: list[float]) -> None:
    ratios = [mine / theirs for mine, theirs in zip(one, two, strict=True)]
    low, middle, high = statistics.quantiles(ratios[1:], n=4) if len(ratios) > 2 else ratios[-1:] * 3
    print(f"{name:<24} first {ratios[0]:.3f}, then {middle:.3f} ({low:.3f}-{high:.3f})")


def wrap(shapes: ModelShapes, shard: Callable[..., Any], mesh: DeviceMesh) -> float:
    """Seconds of CPU to wrap every block of a new model, and the model."""
    model, blocks = build(shapes)
    gc.collect()
    gc.disable()
    begin = time.process_time()
    for block in blocks:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    taken = time.process_time() - begin
    gc.enable()
    return taken


def build(shapes: ModelShapes) -> tuple[nn.Module, list[nn.Module]]:
    """A module tree without memory and without forward that has the parameters of `shapes`, and its blocks."""
    root = nn.Module()
    blocks = []
    for group in shapes.groups:
        for prefix in group.prefixes:
            is_root = prefix in ("", "root")
            for spec in group.specs:
                name = spec.fqn if is_root else prefix + spec.fqn.removeprefix(group.prefixes[0])
                param = nn.Parameter(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta"))
                path, _, leaf = name.rpartition(".")
                _descend(root, path).register_parameter(leaf, param)
            if not is_root:
                blocks.append(_descend(root, prefix))
    return root, blocks


def _descend(module: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


if __name__ == "__main__":
    main()
