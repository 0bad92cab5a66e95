"""Checkpoints: metadata of large models, and time and memory of saving and loading beside FSDP2's.

    python benchmarks/checkpoint.py scale            DeepSeek-V3 at 1,024 and 16,384 ranks: chunks, bytes, seconds
    python benchmarks/checkpoint.py compare          4 gloo ranks, one run: ours and FSDP2 through the same DCP calls

`scale` needs no ranks: a plan says what every rank will write. Metadata is what rank 0 pickles, parameters alone; with
AdamW there are three times as many tensors. `compare` takes the best of some rounds, engines in turn; ratios are ours
over FSDP2's. Memory is the growth of the process's high-water mark.
"""

from __future__ import annotations

import pickle
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2

from ragged_dtensor.layout import flat_boxes
from vescale_fsdp import fully_shard, load, save
from vescale_fsdp.model_plan import plan_model
from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.shapes import read_shapes

MODEL = Path(__file__).parent / "models" / "deepseek-v3-671b.json"
NUM_RANKS = 4
WIDTH, DEPTH, ROUNDS = 1024, 8, 3


def scale() -> None:
    shapes = read_shapes(MODEL)
    print(f"{shapes.model}: {shapes.numel:,} parameters, one copy of equal groups measured, all counted")
    for num_ranks in (1024, 16384):
        begin = time.perf_counter()
        plan = plan_model(shapes, num_ranks)
        planned = time.perf_counter() - begin
        chunks = nbytes = 0
        begin = time.perf_counter()
        for group in plan.groups:
            found = metadata_of(group.plan)
            chunks += group.count * len(found.storage_data)
            nbytes += group.count * len(pickle.dumps(found))
        seconds = time.perf_counter() - begin
        print(
            f"{num_ranks:6} ranks: planned in {planned:.3f} s; {chunks:,} chunks, {nbytes / 1e6:.1f} MB of metadata "
            f"({nbytes / chunks:.0f} bytes a chunk), {seconds:.2f} s for {len(plan.groups)} distinct groups"
        )


def metadata_of(plan: GroupPlan) -> Metadata:
    """What DCP keeps of the group: a box and a place per chunk. Only ranks that own something are visited."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for tensor in plan.tensors:
        spec, share = tensor.spec, plan.lanes[tensor.lane].share
        boxes = []
        for rank in range(tensor.start // share, min(plan.num_ranks, -(-(tensor.start + spec.numel) // share))):
            span = plan.shard_range(spec.fqn, rank)
            for offsets, sizes, _ in flat_boxes(spec.shape, span.begin, span.end):
                boxes.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                index = MetadataIndex(spec.fqn, torch.Size(offsets), len(boxes) - 1)
                places[index] = _StorageInfo(f"__{rank}_0.distcp", 0, 1)
        tensors[spec.fqn] = TensorStorageMetadata(TensorProperties(), torch.Size(spec.shape), boxes)
    return Metadata(state_dict_metadata=tensors, storage_data=places)  # type: ignore[arg-type]


def compare() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder,), nprocs=NUM_RANKS)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    engines: dict[str, Callable[[nn.Module], nn.Module]] = {"fsdp2": fsdp2, "ours": fully_shard}
    models = {name: build(wrap) for name, wrap in engines.items()}
    times: dict[str, list[float]] = {}
    grown: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, (model, optimizer) in models.items():
            state = {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}
            path = f"{folder}/{name}"
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            for what, work in (
                ("dcp.save", lambda state=state, path=path: dcp.save(state, checkpoint_id=path)),
                ("dcp.load", lambda state=state, path=path: dcp.load(state, checkpoint_id=path)),
                ("save", lambda m=model, o=optimizer, path=path: save(path + "-safe", m, o)),
                ("load", lambda m=model, o=optimizer, path=path: load(path + "-safe", m, o)),
            ):
                dist.barrier()
                high, begin = high_water(), time.perf_counter()
                work()
                dist.barrier()
                times.setdefault(f"{name} {what}", []).append(time.perf_counter() - begin)
                grown[f"{name} {what}"] = max(grown.get(f"{name} {what}", 0), high_water() - high)
    if rank == 0:
        for key, found in times.items():
            ratio = min(found) / min(times["fsdp2 " + key.split(" ", 1)[1]])
            print(f"{key:16} {min(found):7.3f} s  ratio {ratio:.2f}  grown by {grown[key] / 1e6:.1f} MB")
    dist.destroy_process_group()


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


def high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    {"scale": scale, "compare": compare}[sys.argv[1] if len(sys.argv) > 1 else "scale"]()
