"""Checkpoints: metadata of large models, and time and memory of saving and loading beside FSDP2's.

    python benchmarks/checkpoint.py scale [RANKS ...]    DeepSeek-V3 at 1,024 and 16,384 ranks, one process, fake group
    python benchmarks/checkpoint.py compare              4 gloo ranks, one run: ours and FSDP2 through the same calls;
                                                         CHECKPOINT_SIZE=1024,8 for other layers: width, number

`scale` wraps one group of each kind on the fake group, makes from its plan what every rank would tell DCP (of rank 0 it
is checked), and lets the planner of `save`, and beside it DCP's own, make and check the global plan; equal groups are
counted, not repeated. DCP's planner is also given as many boxes of the same tensors cut by rows, Shard(0). Parameters
alone: with AdamW there are three times as many tensors.

`compare` alternates the engines. Ratios are ours over FSDP2's, of the two neighbours of each round: their quartiles, of
seconds and of processor time of all ranks together. Memory is how far the process's resident set rose above where it
was, the most of all ranks and the least of all rounds. Collectives are those of a round of its own, which is not timed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2

from ragged_dtensor.layout import flat_boxes
from vescale_fsdp import fully_shard, load, report, save
from vescale_fsdp.checkpoint.save_planner import BoxSavePlanner, collection_paused
from vescale_fsdp.demo.meter import StepMeter
from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.shapes import ShapeGroup, read_shapes

MODEL = Path(__file__).parent / "models" / "deepseek-v3-671b.json"
NUM_RANKS = 4
WIDTH, DEPTH = (int(number) for number in os.environ.get("CHECKPOINT_SIZE", "4096,2").split(","))
ROUNDS = 13

LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD = -3
"""What glibc maps by itself it also gives back, so that the resident set follows what is alive."""


# scale


def scale(num_ranks: int) -> None:
    shapes = read_shapes(str(MODEL))
    chunks = nbytes = tensors = copies = rows = 0
    seconds = dict.fromkeys(("save", "DCP", "DCP, Shard(0)"), 0.0)
    for group in shapes.groups:
        plan, of_rank_0 = wrapped_group(group, num_ranks)
        plans = local_plans(plan)
        mine = sum(len(each.items) for each in plans)
        assert len(plans[0].items) == of_rank_0, f"rank 0 says {of_rank_0} boxes, the plan {len(plans[0].items)}"
        by_rows = rows_plans(plan, mine)
        works = {
            "save": (plans, BoxSavePlanner(same_names=True)),
            "DCP": (plans, DefaultSavePlanner()),
            "DCP, Shard(0)": (by_rows, DefaultSavePlanner()),
        }
        for name, (each, planner) in works.items():
            metadata, taken = global_plan(each, planner)
            seconds[name] += group.count * taken * mine / sum(len(one.items) for one in each)
            nbytes += group.count * len(pickle.dumps(metadata)) if name == "save" else 0
        copies += group.count
        chunks += group.count * mine
        tensors += group.count * len(plan.specs)
        rows += group.count * sum(min(num_ranks, spec.shape[0] if spec.shape else 1) for spec in plan.specs)
    density = chunks / (tensors + copies * num_ranks)
    times = (f"{name}: {taken:.1f} s ({taken / chunks * 1e6:.1f} us a chunk)" for name, taken in seconds.items())
    print(
        f"{num_ranks:6} ranks: {tensors:,} tensors in {copies} groups; {chunks:,} chunks ({density:.2f} for each "
        f"tensor and each rank of a group; Shard(0) has {rows:,}), {nbytes / 1e6:.0f} MB of metadata "
        f"({nbytes / chunks:.0f} bytes a chunk). Rank 0 plans for {', '.join(times)}",
        flush=True,
    )


def wrapped_group(shapes: ShapeGroup, num_ranks: int) -> tuple[GroupPlan, int]:
    """The group wrapped on the fake group and the meta device: its plan, and how many boxes rank 0 says it writes."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    with torch.device("meta"):
        module = nn.ParameterDict(
            {
                spec.fqn.replace(".", "_"): nn.Parameter(torch.empty(spec.shape, dtype=torch.bfloat16))
                for spec in shapes.specs
            }
        )
    module.forward = lambda: None
    wrapped: Any = fully_shard(module)
    (group,) = report(wrapped).groups
    boxes = sum(len(param.__create_chunk_list__()) for param in wrapped.parameters())
    dist.destroy_process_group()
    return group.plan, boxes


def local_plans(plan: GroupPlan) -> list[SavePlan]:
    """What every rank tells rank 0. Only ranks that own something of a tensor are visited."""
    items: list[list[WriteItem]] = [[] for _ in range(plan.num_ranks)]
    properties = TensorProperties(dtype=torch.bfloat16)
    for tensor in plan.tensors:
        spec, share = tensor.spec, plan.lanes[tensor.lane].share
        size = torch.Size(spec.shape)
        for rank in range(tensor.start // share, min(plan.num_ranks, -(-(tensor.start + spec.numel) // share))):
            span = plan.shard_range(spec.fqn, rank)
            for offsets, sizes, _ in flat_boxes(spec.shape, span.begin, span.end):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, properties, size)
                index = MetadataIndex(spec.fqn, chunk.offsets)
                items[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(each, planner_data={}) for each in items]


def rows_plans(plan: GroupPlan, num_chunks: int) -> list[SavePlan]:
    """About `num_chunks` boxes of the group's tensors as Shard(0) cuts them, over as many ranks as that takes."""
    sizes = [torch.Size(spec.shape or (1,)) for spec in plan.specs]
    num_ranks = 1
    while sum(min(size[0], num_ranks) for size in sizes) < num_chunks and num_ranks < max(size[0] for size in sizes):
        num_ranks *= 2
    items: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    properties = TensorProperties(dtype=torch.bfloat16)
    for spec, size in zip(plan.specs, sizes, strict=True):
        step = -(-size[0] // num_ranks)
        for rank, begin in enumerate(range(0, size[0], step)):
            offsets = torch.Size((begin, *(0 for _ in size[1:])))
            chunk = ChunkStorageMetadata(offsets, torch.Size((min(step, size[0] - begin), *size[1:])))
            data = TensorWriteData(chunk, properties, size)
            items[rank].append(WriteItem(MetadataIndex(spec.fqn, offsets), WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(each, planner_data={}) for each in items]


def global_plan(plans: list[SavePlan], planner: DefaultSavePlanner) -> tuple[Metadata, float]:
    """Rank 0's work, drop duplicates, collect boxes, check that they cover every tensor once; and its seconds."""
    planner.set_up_planner({}, None, True)
    begin = time.process_time()
    pause = collection_paused() if isinstance(planner, BoxSavePlanner) else nullcontext()
    with pause:
        final, metadata = planner.create_global_plan(plans)
    seconds = time.process_time() - begin
    places = enumerate(item.index for plan in final for item in plan.items)
    metadata.storage_data = {index: _StorageInfo(f"__{number}_0.distcp", number, number) for number, index in places}
    return metadata, seconds


# compare


def compare() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder,), nprocs=NUM_RANKS)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    engines: dict[str, Callable[[nn.Module], nn.Module]] = {"fsdp2": fsdp2, "ours": fully_shard}
    models = {name: build(wrap) for name, wrap in engines.items()}
    found: dict[str, list[Round]] = {}
    for number in range(-1, ROUNDS):  # the first round only warms up
        for what in ("dcp.save", "dcp.load", "save", "load"):
            for name in reversed(models) if number % 2 else models:
                measured_round = measured(works(*models[name], f"{folder}/{name}")[what])
                if number >= 0:
                    found.setdefault(f"{name} {what}", []).append(measured_round)
    counts = {}
    for name, (model, optimizer) in models.items():
        for what, work in works(model, optimizer, f"{folder}/{name}").items():
            with StepMeter(NUM_RANKS) as meter:
                work()
            counts[f"{name} {what}"] = dict(meter.collectives)
    if rank == 0:
        for key, rounds in found.items():
            print(line(key, rounds, found["fsdp2 " + key.split(" ", 1)[1]], counts[key]))
    dist.barrier()
    dist.destroy_process_group()


def works(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> dict[str, Callable[[], Any]]:
    def state() -> dict[str, Any]:
        return {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}

    def dcp_save() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        dcp.save(state(), checkpoint_id=path)

    return {
        "dcp.save": dcp_save,
        "dcp.load": lambda: dcp.load(state(), checkpoint_id=path),
        "save": lambda: save(path + "-safe", model, optimizer),
        "load": lambda: load(path + "-safe", model, optimizer),
    }


class Round(NamedTuple):
    """Seconds, processor time of all ranks, and how much the resident set rose, of the rank where it rose most."""

    seconds: float
    processor: float
    nbytes: int


def measured(work: Callable[[], Any]) -> Round:
    LIBC.malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, begin, processor = resident("VmRSS"), time.perf_counter(), time.process_time()
    work()
    used = torch.tensor(time.process_time() - processor)
    dist.barrier()
    seconds = time.perf_counter() - begin
    most = torch.tensor(max(resident("VmHWM") - before, 0))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return Round(seconds, float(used), int(most))


def line(key: str, rounds: list[Round], base: list[Round], collectives: dict[str, int]) -> str:
    wall, processor = (
        " / ".join(f"{q:.2f}" for q in quantiles([o[field] / t[field] for o, t in zip(rounds, base, strict=True)], n=4))
        for field in (0, 1)
    )
    grown, theirs = (min(each.nbytes for each in both) for both in (rounds, base))
    return (
        f"{key:14} {median(each.seconds for each in rounds):7.3f} s  ratio {wall}   processor "
        f"{median(each.processor for each in rounds):7.3f} s  ratio {processor}   +{grown / 1e6:5.1f} MB  ratio "
        f"{grown / max(theirs, 1):.2f}   {sum(collectives.values())} collectives {collectives}"
    )


def resident(what: str) -> int:
    """Bytes now (VmRSS) or at most (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def build(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in layers:
        wrap(layer)
    model = wrap(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or ["scale"]
    if command == "compare":
        compare()
    else:
        for number in arguments or ("1024", "16384"):
            scale(int(number))
