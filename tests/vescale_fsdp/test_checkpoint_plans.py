"""Who writes what: every box by one rank, announced once, and proved to cover each tensor without comparing all."""

from __future__ import annotations

import itertools
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import ranks
from small_models import Tower
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ragged_dtensor.layout import flat_boxes
from vescale_fsdp import CheckpointError, fully_shard, save
from vescale_fsdp.checkpoint import cover
from vescale_fsdp.checkpoint.contents import state_of
from vescale_fsdp.checkpoint.cover import uncovered
from vescale_fsdp.checkpoint.files import CheckedWriter
from vescale_fsdp.checkpoint.save_planner import BoxSavePlanner

Box = tuple[Sequence[int], Sequence[int]]


def shared_folder() -> Path:
    found: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def flat_cut(shape: tuple[int, ...], cuts: Sequence[int]) -> list[Box]:
    ends = [0, *cuts, torch.Size(shape).numel()]
    return [(o, s) for begin, end in itertools.pairwise(ends) for o, s, _ in flat_boxes(shape, begin, end)]


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (1, 4)), ((1, 0), (1, 1)), ((1, 1), (1, 3)), ((2, 0), (1, 4))], None),
        ([((0, 0), (3, 2)), ((0, 2), (3, 2))], None),
        ([((0, 0), (2, 4)), ((3, 0), (0, 4)), ((2, 0), (1, 4))], None),
        ([((0, 0), (2, 4))], "its boxes hold 8 of its 12 elements"),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], r"\(0, 0\)\+\(2, 4\) and \(1, 0\)\+\(2, 4\) overlap"),
        ([((0, 0), (3, 2)), ((0, 1), (3, 3))], r"\(0, 0\)\+\(3, 2\) and \(0, 1\)\+\(3, 3\) overlap"),
        ([((0, 0), (3, 4)), ((2, 1), (2, 1))], r"\(2, 1\)\+\(2, 1\) reaches beyond \(3, 4\)"),
    ],
)
def test_gaps_overlaps_and_boxes_that_reach_beyond_are_named(boxes: list[Box], problem: str | None) -> None:
    found = uncovered((3, 4), boxes)
    if problem is None:
        assert found is None
    else:
        with pytest.raises(CheckpointError, match=problem):
            raise CheckpointError(str(found))


def test_of_any_boxes_the_verdict_is_that_of_counting_elements() -> None:
    generator = random.Random(3)
    verdicts = []
    for _ in range(400):
        shape = tuple(generator.randint(1, 4) for _ in range(generator.randint(1, 3)))
        boxes = flat_cut(shape, sorted(generator.choices(range(torch.Size(shape).numel() + 1), k=2)))
        if generator.random() < 0.5:  # columns beside them, which are no runs
            shape = (*shape, 4)
            boxes = [((*o, begin), (*s, size)) for o, s in boxes for begin, size in ((0, 1), (1, 3))]
        if generator.random() < 0.5:
            boxes[generator.randrange(len(boxes))] = boxes[generator.randrange(len(boxes))]
        generator.shuffle(boxes)
        seen = torch.zeros(shape)
        for offsets, sizes in boxes:
            seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        verdicts.append(bool((seen == 1).all()))
        assert (uncovered(shape, boxes) is None) == verdicts[-1], (shape, boxes)
    assert {True, False} == set(verdicts)


def test_flat_cuts_of_a_tensor_with_more_columns_than_rows_are_not_compared_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's check of the same boxes takes time quadratic in them."""
    compared: list[int] = []
    monkeypatch.setattr(cover, "_overlap", lambda boxes: compared.append(len(boxes)))
    assert uncovered((64, 512), flat_cut((64, 512), range(300, 64 * 512, 300))) is None
    assert not compared


def made(mesh: str) -> dict[str, Any]:
    """The state dict that `save` writes."""
    torch.manual_seed(0)
    model = Tower(hidden=10, out=3)
    if mesh == "replicas":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    elif mesh == "tensor parallel":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        for block in model.blocks:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel()})
        fully_shard(model, mesh=both["dp_shard"])
    elif mesh == "sharded":
        fully_shard(model)
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = param.detach().clone()
    adamw.step()
    adamw.zero_grad()
    return state_of(model, adamw)


def planned(planner: DefaultSavePlanner, state: dict[str, Any]) -> tuple[list[int], list[Any], Any]:
    """How many items each rank announces, what each writes, and the metadata; on every rank."""
    planner.set_up_planner(state, None, dist.get_rank() == 0)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, planner.create_local_plan())
    final, metadata = planner.create_global_plan(plans)
    return [len(plan.items) for plan in plans], final, metadata


def contents(metadata: Any) -> dict[str, Any]:
    """What a checkpoint holds, without the order of its boxes and without empty ones."""
    found = {}
    for fqn, each in metadata.state_dict_metadata.items():
        boxes = {(chunk.offsets, chunk.sizes) for chunk in getattr(each, "chunks", []) if math.prod(chunk.sizes)}
        found[fqn] = (tuple(each.size), each.properties, boxes) if hasattr(each, "chunks") else each
    return found


@ranks(4)
@pytest.mark.parametrize("mesh", ["sharded", "replicas", "tensor parallel", "none"])
def test_checkpoints_hold_what_torchs_planner_would_write_each_box_once(mesh: str) -> None:
    state = made(mesh)
    announced, final, metadata = planned(BoxSavePlanner(same_names=True), state)
    theirs_announced, _, theirs = planned(DefaultSavePlanner(), state)
    assert contents(metadata) == contents(theirs)
    assert metadata.planner_data == theirs.planner_data
    written = [(item.index.fqn, item.index.offset) for plan in final for item in plan.items]
    assert len(written) == len(set(written))
    assert sum(announced) < sum(theirs_announced)
    if mesh != "tensor parallel":  # whose ranks do not know that others hold the same norms
        assert sum(announced) == len(written)
    counts = [len(plan.items) for plan in final]
    assert min(counts) > 0
    if mesh == "none":
        assert max(counts) - min(counts) <= 1


@ranks(2)
def test_a_tensor_that_is_not_whole_is_named() -> None:
    state = {"w": fully_shard(nn.Linear(6, 4)).weight.detach()}
    planner = BoxSavePlanner(same_names=True)
    planner.set_up_planner(state, None, dist.get_rank() == 0)
    plan = planner.create_local_plan()
    with pytest.raises(CheckpointError, match=r"w: its boxes hold (8|16) of its 24 elements"):
        planner.create_global_plan([plan])


@ranks(2)
def test_names_that_differ_between_ranks_are_all_written() -> None:
    """As of pipeline stages: what both have once, and what one has."""
    folder, rank = shared_folder(), dist.get_rank()
    model = nn.ModuleDict({"both": nn.Linear(2, 2), f"stage{rank}": nn.Linear(3, 3)})
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    save(folder, model)
    found = {f"model.stage{stage}.weight": torch.zeros(3, 3) for stage in range(2)}
    found["model.both.bias"] = torch.zeros(2)
    dcp.load(found, checkpoint_id=str(folder / "data-1"))
    assert all(bool((value == 7).all()) for value in found.values())


@ranks(2)
def test_metadata_is_written_and_not_sent_to_all_ranks() -> None:
    folder, state = shared_folder(), made("sharded")
    left = dcp.save(state, storage_writer=CheckedWriter(folder), planner=BoxSavePlanner(same_names=True))
    assert not left.state_dict_metadata
    assert not left.storage_data
    written = FileSystemReader(folder).read_metadata()
    assert set(written.state_dict_metadata) >= {"model.head.weight", "optimizer.state.head.weight.exp_avg"}
    assert len(written.storage_data) == sum(
        len(getattr(each, "chunks", [0])) for each in written.state_dict_metadata.values()
    )
