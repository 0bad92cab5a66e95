"""Who writes what: each box by one rank, known to it without asking, and checked on rank 0 in time linear in the boxes.

torch's planner lets every rank announce everything that it could write, its share and whatever all ranks hold alike;
rank 0 drops the duplicates and compares boxes, of a tensor with more columns than rows every box with every other.
Here, where all ranks have the same names, each announces what it will write:

    a share               the rank that holds it; of HSDP replicas, one, by turns from tensor to tensor
    what all ranks hold   one of all ranks, by turns: plain tensors, step counts, options

and rank 0 collects the boxes and proves that they cover every tensor once. What is written is the same.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .cover import uncovered
from .errors import CheckpointError

__all__ = ["BoxSavePlanner", "collection_paused"]


class BoxSavePlanner(DefaultSavePlanner):
    """A planner for torch.distributed.checkpoint's `save`; checkpoints are those of its default planner.

    same_names: whether every rank's state dict has the same names in the same order. If not, every rank announces all
        that it has, as with torch's planner.
    """

    def __init__(self, *, same_names: bool) -> None:
        super().__init__()
        self._same_names = same_names

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        if not self._same_names:
            return super().create_local_plan()
        mine = {fqn: value for turn, (fqn, value) in enumerate(self.state_dict.items()) if _is_mine(turn, value)}
        items = [
            item for item in create_default_local_save_plan(mine, self.is_coordinator).items if _has_elements(item)
        ]
        self.plan = SavePlan(items, planner_data=self.mappings if self.is_coordinator else {})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: what every rank writes, and what the checkpoint will hold."""
        plans = _without_duplicates(all_plans)
        mappings: dict[str, Any] = {}
        for plan in plans:
            mappings.update(plan.planner_data)
        found = _collected(plans)
        for fqn, each in found.items():
            if isinstance(each, TensorStorageMetadata):
                _check(fqn, each)
        self.global_plan, self.metadata = plans, Metadata(found, planner_data=mappings)
        return plans, self.metadata


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let Python's collector rest: it would walk through millions of boxes that are all alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_mine(turn: int, value: object) -> bool:
    """Whether this rank writes its part of `value`, the `turn`-th of the state dict."""
    if not isinstance(value, DTensor):
        shards_itself = hasattr(value, "__create_write_items__") or hasattr(value, "local_shards")
        num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        return shards_itself or turn % num_ranks == rank
    coordinate, number, count = value.device_mesh.get_coordinate(), 0, 1
    if coordinate is None:
        return False
    for placement, size, index in zip(value.placements, value.device_mesh.shape, coordinate, strict=True):
        if placement.is_replicate() or not value.numel():
            number, count = number * size + index, count * size
    return turn % count == number


def _has_elements(item: WriteItem) -> bool:
    """Or is of a tensor without any, whose name is not to be lost."""
    data = item.tensor_data
    return data is None or math.prod(data.chunk.sizes) > 0 or not math.prod(data.size)


def _without_duplicates(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Of ranks that hold the same, the one that has least to write so far."""
    holders: dict[tuple[str, torch.Size | None], list[int]] = defaultdict(list)
    for number, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index.fqn, item.index.offset].append(number)
    if len(holders) == sum(len(plan.items) for plan in plans):
        return list(plans)
    kept: list[list[WriteItem]] = [[] for _ in plans]
    nbytes = [0] * len(plans)
    for plan in plans:
        for item in plan.items:
            several = holders.pop((item.index.fqn, item.index.offset), None)
            if several is not None:
                chosen = min(several, key=nbytes.__getitem__)
                nbytes[chosen] += _nbytes(item)
                kept[chosen].append(item)
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, kept, strict=True)]


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _collected(plans: Sequence[SavePlan]) -> dict[str, Any]:
    """What the checkpoint holds, by name."""
    found: dict[str, Any] = {}
    for plan in plans:
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            known = found.get(fqn)
            if known is not None and item.type is not WriteItemType.SHARD:
                raise CheckpointError(f"{fqn}: two ranks would write it")
            if data is None:
                found[fqn] = BytesStorageMetadata()
            elif known is None:
                found[fqn] = TensorStorageMetadata(data.properties, data.size, [data.chunk])
            else:
                known.chunks.append(data.chunk)
    return found


def _check(fqn: str, found: TensorStorageMetadata) -> None:
    problem = uncovered(found.size, [(chunk.offsets, chunk.sizes) for chunk in found.chunks])
    if problem is not None:
        raise CheckpointError(
            f"{fqn}: {problem}. All ranks have to save one model, cut in one way; see whether they built the same."
        )
