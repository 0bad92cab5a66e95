"""Checkpoints: metadata of large models, and time and memory of saving and loading beside FSDP2's.

    python benchmarks/checkpoint.py scale [RANKS ...]    DeepSeek-V3 at 1,024 and 16,384 ranks, one process, fake group
    python benchmarks/checkpoint.py compare              4 gloo ranks, one run: ours and FSDP2 through the same calls;
                                                         CHECKPOINT_SIZE=1024,8 for other layers: width, number

`scale` wraps one group of each kind on the fake group, makes from its plan what every rank would tell DCP (of rank 0 it
is checked), and lets DCP's own planner make and check the global plan; equal groups are counted, not repeated.
Parameters alone: with AdamW there are three times as many tensors.

`compare` alternates the engines and takes each one's best round; ratios are ours over FSDP2's. Memory is how far the
process's resident set rose above where it was, the most of all ranks and the least of all rounds. Collectives are those
of a round of its own, which is not timed.
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
from pathlib import Path
from typing import Any

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
from vescale_fsdp.demo.meter import StepMeter
from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.shapes import ShapeGroup, read_shapes

MODEL = Path(__file__).parent / "models" / "deepseek-v3-671b.json"
NUM_RANKS = 4
WIDTH, DEPTH = (int(number) for number in os.environ.get("CHECKPOINT_SIZE", "4096,2").split(","))
ROUNDS = 5

LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD = -3
"""What glibc maps by itself it also gives back, so that the resident set follows what is alive."""


# scale


def scale(num_ranks: int) -> None:
    shapes = read_shapes(str(MODEL))
    chunks = nbytes = tensors = copies = 0
    planned = seconds = 0.0
    for group in shapes.groups:
        begin = time.process_time()
        plan, of_rank_0 = wrapped_group(group, num_ranks)
        planned += time.process_time() - begin
        plans = local_plans(plan)
        assert len(plans[0].items) == of_rank_0, f"rank 0 says {of_rank_0} boxes, the plan {len(plans[0].items)}"
        begin = time.process_time()
        metadata = global_plan(plans)
        seconds += group.count * (time.process_time() - begin)
        copies += group.count
        chunks += group.count * sum(len(each.items) for each in plans)
        tensors += group.count * len(plan.specs)
        nbytes += group.count * len(pickle.dumps(metadata))
    print(
        f"{num_ranks:6} ranks: {tensors:,} tensors in {copies} groups, one of each kind wrapped in {planned:.2f} s; "
        f"{chunks:,} chunks ({chunks / (tensors + copies * num_ranks):.2f} for each tensor and each rank of a group), "
        f"{nbytes / 1e6:.0f} MB of metadata ({nbytes / chunks:.0f} bytes a chunk), rank 0 plans for {seconds:.0f} s "
        f"({seconds / chunks * 1e6:.0f} us a chunk)",
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


def global_plan(plans: list[SavePlan]) -> Metadata:
    """DCP's own work on rank 0: drop duplicates, collect boxes, check that they neither overlap nor leave gaps."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, True)
    planner.mappings = {}
    final, metadata = planner.create_global_plan(plans)
    places = enumerate(item.index for plan in final for item in plan.items)
    metadata.storage_data = {index: _StorageInfo(f"__{number}_0.distcp", number, number) for number, index in places}
    return metadata


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
    times: dict[str, list[float]] = {}
    grown: dict[str, list[int]] = {}
    for number in range(ROUNDS):
        for name in reversed(models) if number % 2 else models:
            for what, work in works(*models[name], f"{folder}/{name}").items():
                seconds, nbytes = measured(work)
                times.setdefault(f"{name} {what}", []).append(seconds)
                grown.setdefault(f"{name} {what}", []).append(nbytes)
    counts = {}
    for name, (model, optimizer) in models.items():
        for what, work in works(model, optimizer, f"{folder}/{name}").items():
            with StepMeter(NUM_RANKS) as meter:
                work()
            counts[f"{name} {what}"] = dict(meter.collectives)
    if rank == 0:
        for key in times:
            base = "fsdp2 " + key.split(" ", 1)[1]
            print(
                f"{key:16} {min(times[key]):7.3f} s  ratio {min(times[key]) / min(times[base]):.2f}   "
                f"+{min(grown[key]) / 1e6:6.1f} MB  ratio {min(grown[key]) / max(min(grown[base]), 1):.2f}   "
                f"{sum(counts[key].values())} collectives {counts[key]}"
            )
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


def measured(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and by how much the resident set of the rank where it rose most did rise."""
    LIBC.malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, begin = resident("VmRSS"), time.perf_counter()
    work()
    dist.barrier()
    seconds = time.perf_counter() - begin
    most = torch.tensor(max(resident("VmHWM") - before, 0))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return seconds, int(most)


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
