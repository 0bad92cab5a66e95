"""What goes wrong while saving and loading: killed anywhere, no room, no folder, another save, damage."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn

from vescale_fsdp import CheckpointError, fully_shard, load, save
from vescale_fsdp.checkpoint import saving


def filled(number: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
    return model


def shared_folder() -> str:
    found: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return str(found[0])


def texts_of_all_ranks(error: Exception) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, str(error))
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills children that it forks")
def test_a_save_killed_at_any_file_operation_leaves_the_previous_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    save(tmp_path, filled(0), extra={"number": 0})
    previous, kills, published = 0, 0, 0
    for point in range(1, 200):
        number = point
        pid = os.fork()
        if not pid:
            save_and_die(tmp_path, number, point)
        _, status = os.waitpid(pid, 0)
        model = filled(-1)
        found = load(tmp_path, model, verify=True)["number"]
        assert found in (previous, number)
        assert all(bool((param == found).all()) for param in model.parameters())
        if not os.WIFSIGNALED(status):
            break
        kills += 1
        published += found == number
        previous = found
    assert found == number
    assert kills >= 10
    assert published >= 1  # killed after the rename, while old data is removed
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.json", *(n for n in os.listdir(tmp_path) if "data" in n)]


def save_and_die(folder: Path, number: int, point: int) -> None:
    """In a forked child: save, and be killed at the `point`-th operation on a file below `folder`."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree") and arguments:
            seen += str(arguments[0]).startswith(str(folder))
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        save(folder, filled(number), extra={"number": number})
    finally:
        os._exit(0)


@ranks(2)
def test_a_rank_without_room_fails_the_save_on_all_ranks_and_leaves_what_was_there() -> None:
    root = shared_folder()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 64))
    save(root, model, extra={"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="not saved, what was there is as it was") as found:
            save(root, model, extra={"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(found.value)
    assert len(set(texts_of_all_ranks(found.value))) == 1
    assert load(root, model, verify=True) == {"step": 1}
    save(root, model, extra={"step": 3})
    assert load(root, model, verify=True) == {"step": 3}


@ranks(2)
def test_a_folder_that_cannot_be_made_is_every_ranks_error() -> None:
    root = shared_folder()
    if dist.get_rank() == 0:
        Path(root, "file").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError, match="file") as found:
        save(f"{root}/file/checkpoint", fully_shard(nn.Linear(3, 3)))
    assert len(set(texts_of_all_ranks(found.value))) == 1


def test_of_two_saves_at_once_one_is_complete_and_the_other_says_that_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = saving.publish

    def publish_after_another(folder: Path, manifest: Any) -> None:
        monkeypatch.setattr(saving, "publish", publish)
        save(tmp_path, filled(2), extra={"number": 2})
        publish(folder, manifest)

    monkeypatch.setattr(saving, "publish", publish_after_another)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save(tmp_path, filled(1), extra={"number": 1})
    model = filled(0)
    assert load(tmp_path, model, verify=True) == {"number": 2}
    assert all(bool((param == 2).all()) for param in model.parameters())


@ranks(2)
def test_a_rank_that_fails_while_reading_fails_all_with_one_text() -> None:
    root = shared_folder()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 64))
    save(root, model)
    if dist.get_rank() == 0:
        path = next(Path(root).glob("data-*/__1_0.distcp"))
        content = path.read_bytes()
        path.write_bytes(b"\0" * len(content))
    dist.barrier()
    with pytest.raises(CheckpointError, match="cannot be read; parameters may have changed") as found:
        load(root, model)
    assert len(set(texts_of_all_ranks(found.value))) == 1
    before = [param.to_local().clone() for param in model.parameters()]
    with pytest.raises(CheckpointError, match="corrupted: expected CRC-32"):
        load(root, model, verify=True)
    assert all(map(torch.equal, before, [param.to_local() for param in model.parameters()]))


@ranks(2)
def test_data_without_its_metadata_or_with_a_damaged_one_is_refused_before_anything_changes() -> None:
    root = shared_folder()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    save(f"{root}/good", model)
    for what in ("missing", "damaged"):
        if dist.get_rank() == 0:
            shutil.copytree(f"{root}/good", f"{root}/{what}")
            metadata = Path(root, what, "data-1", ".metadata")
            content = metadata.read_bytes()
            metadata.unlink() if what == "missing" else metadata.write_bytes(b"x" * len(content))
        dist.barrier()
        before = model.weight.full_tensor()
        with pytest.raises(CheckpointError, match=r"\.metadata: missing|UnpicklingError|invalid load key") as found:
            load(f"{root}/{what}", model)
        assert len(set(texts_of_all_ranks(found.value))) == 1
        assert torch.equal(model.weight.full_tensor(), before)
