"""`save` and `load`: what is wrong is found before anything changes, and named alike on all ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from vescale_fsdp import CheckpointError, fully_shard, load, save


class Tied(nn.Module):
    def __init__(self, rows: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(tokens)))


def wrapped(seed: int, rows: int = 11) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(Tied(rows))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: param.full_tensor() for fqn, param in model.named_parameters()}  # type: ignore[attr-defined]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for fqn, value in one.items():
        assert torch.equal(value, other[fqn]), fqn


def write(root: str) -> None:
    model = wrapped(1)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    model.count.fill_(7)
    save(root, model, optimizer, extra={"step": 2})
    if dist.get_rank() == 0:
        train_on = fully_on_one(model)
        torch.save(train_on, f"{root}/expected")
    else:
        fully_on_one(model)


def fully_on_one(model: nn.Module) -> dict[str, torch.Tensor]:
    return whole(model)


def resume(root: str) -> None:
    model = wrapped(2)
    optimizer = adamw(model)
    model(torch.arange(8)).sum().backward()  # gradients keep torch's own functions from making slots
    assert load(root, model, optimizer, verify=True) == {"step": 2}
    assert model.count == 7
    assert_same(whole(model), torch.load(f"{root}/expected"))
    assert model.head.weight is model.embed.weight
    assert all(optimizer.state[param]["step"] == 2 for param in [model.mix.weight, model.embed.weight])
    assert not optimizer.state.get(model.unused.weight)
    assert model.mix.weight.grad is not None


def test_a_fresh_optimizer_gets_its_slots_at_any_world_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """C46, A17: slots and step counts are never dropped; tied parameters are one entry and an alias."""
    rank_pool.run(4, __file__, "write", {"root": str(tmp_path)})
    for world in [1, 3]:
        rank_pool.run(world, __file__, "resume", {"root": str(tmp_path)})
    manifest = json.loads((tmp_path / "checkpoint.json").read_text())
    assert manifest["aliases"] == {"head.weight": "embed.weight"}


@ranks(2)
def test_resumed_training_is_the_uninterrupted_one_bit_for_bit() -> None:
    """C46: with a fresh optimizer."""
    root = shared_folder()
    model = wrapped(1)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    save(root, model, optimizer)
    train(model, optimizer, 2)
    twin = wrapped(2)
    other = adamw(twin)
    load(root, twin, other)
    train(twin, other, 2)
    assert_same(whole(twin), whole(model))


def shared_folder() -> str:
    import tempfile

    found: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return str(found[0])


def break_it(root: Path, how: str) -> None:
    manifest = json.loads((root / "checkpoint.json").read_text())
    data = root / manifest["data"] / "__1_0.distcp"
    match how:
        case "newer":
            (root / "checkpoint.json").write_text(json.dumps(manifest | {"version": 99}))
        case "truncated":
            os.truncate(data, data.stat().st_size - 1)
        case "missing":
            data.unlink()
        case "flipped":
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        case "no json":
            (root / "checkpoint.json").write_text("{")
        case "none":
            (root / "checkpoint.json").unlink()
        case "field":
            (root / "checkpoint.json").write_text(json.dumps({"version": 1}))


BROKEN = {
    "newer": "format version 99, but this vescale-fsdp reads up to 1",
    "truncated": "__1_0.distcp: truncated: expected",
    "missing": "__1_0.distcp: missing",
    "flipped": "__1_0.distcp: corrupted: expected CRC-32",
    "no json": "checkpoint.json: not JSON",
    "none": "holds no checkpoint",
    "field": "expected version, data, files, aliases and extra",
}


@ranks(2)
def test_what_is_damaged_is_named_before_anything_changes() -> None:
    root = shared_folder()
    source = wrapped(1)
    save(f"{root}/good", source)
    model = wrapped(2)
    before = whole(model)
    for how, message in BROKEN.items():
        bad = Path(root) / how
        if dist.get_rank() == 0:
            shutil.copytree(f"{root}/good", bad)
            break_it(bad, how)
        dist.barrier()
        with pytest.raises(CheckpointError, match=message):
            load(bad, model, verify=True)
        assert_same(whole(model), before)


@ranks(3)
def test_another_model_is_refused_with_the_names() -> None:
    root = shared_folder()
    save(root, wrapped(1))
    other = wrapped(1, rows=12)
    before = whole(other)
    with pytest.raises(
        CheckpointError, match=r"model.embed.weight: expected shape \(12, 6\), the checkpoint has \(11, 6\)"
    ):
        load(root, other)
    assert_same(whole(other), before)
    torch.manual_seed(0)
    renamed = fully_shard(nn.Sequential(nn.Linear(6, 6)))
    with pytest.raises(CheckpointError) as found:
        load(root, renamed)
    assert "model.0.weight: in the model or optimizer, not in the checkpoint" in str(found.value)
    assert "model.mix.weight: in the checkpoint, not in the model or optimizer" in str(found.value)


@ranks(2)
def test_names_that_were_tied_ask_to_be_tied() -> None:
    root = shared_folder()
    save(root, wrapped(1))
    torch.manual_seed(0)
    model = Tied()
    model.head = nn.Linear(6, 11, bias=False)
    with pytest.raises(CheckpointError, match=r"model.head.weight: was tied to embed.weight"):
        load(root, fully_shard(model))


@ranks(2)
def test_an_optimizer_that_was_not_saved_is_named_and_left_as_it_was() -> None:
    root = shared_folder()
    model = wrapped(1)
    save(root, model, torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1))
    optimizer = adamw(model)
    train(model, optimizer, 1)
    state = dict(optimizer.state)
    with pytest.raises(CheckpointError, match="exp_avg: in the model or optimizer, not in the checkpoint"):
        load(root, model, optimizer)
    assert dict(optimizer.state) == state


@ranks(8)
def test_ranks_that_own_nothing_name_the_same_state_and_wait_for_nobody() -> None:
    """C45: two elements and a bias over eight ranks."""
    root = shared_folder()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(2, 1))
    optimizer = adamw(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    held = sum(param.to_local().numel() for param in model.parameters())
    names = sorted(get_optimizer_state_dict(model, optimizer)["state"])
    found: list[Any] = [None] * 8
    dist.all_gather_object(found, (held, names))
    assert min(held for held, _ in found) == 0
    assert [names for _, names in found] == [["bias", "weight"]] * 8
    save(root, model, optimizer)
    twin = fully_shard(nn.Linear(2, 1))
    other = adamw(twin)
    load(root, twin, other, verify=True)
    assert_same(whole(twin), whole(model))
    assert all(other.state[param]["step"] == 1 for param in twin.parameters())


@ranks(2)
def test_another_number_of_parameter_groups_is_said_in_words() -> None:
    root, model = shared_folder(), wrapped(1)
    params = list(model.parameters())
    one, two = (
        torch.optim.SGD(params, lr=0.1),
        torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1),
    )
    save(root, model, two)
    with pytest.raises(CheckpointError, match="its optimizer has 2 parameter groups, not 1"):
        load(root, model, one)
    save(root, model, one)
    with pytest.raises(CheckpointError, match="its optimizer has 1 parameter group, not 2"):
        load(root, model, two)


@ranks(2)
def test_an_optimizer_of_another_model_is_refused_in_words() -> None:
    folder, model, other = shared_folder(), wrapped(seed=1), wrapped(seed=2)
    with pytest.raises(CheckpointError, match=r"optimizer: . of its . parameters are none of the model's"):
        save(folder, model, adamw(other))


@ranks(2)
def test_extra_holds_json_and_an_error_of_one_rank_is_all_ranks() -> None:
    root = shared_folder()
    model = wrapped(1)
    save(root, model, extra={"step": 1})
    with pytest.raises(CheckpointError, match="extra: expected values that JSON can hold"):
        save(root, model, extra={"step": torch.tensor(1)})
    assert load(root, model) == {"step": 1}
    assert sorted(os.listdir(root)) == ["checkpoint.json", "data-1"]


SAVER = """
import sys, torch, torch.distributed as dist
sys.path[:0] = [{tests!r}, {here!r}]
from test_checkpoint_safety import wrapped, adamw, save
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{root}/store" + sys.argv[2], rank=rank, world_size=2)
model = wrapped(1)
for number in range(int(sys.argv[3]), 10**6):
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(number)
    if rank == 0:
        print(number, flush=True)
    save("{root}/checkpoint", model, extra={{"number": number}})
"""


def check_is_complete(root: str, least: int) -> None:
    model = wrapped(3)
    number = load(root, model, verify=True)["number"]
    assert number >= least
    for fqn, value in whole(model).items():
        assert bool((value == number).all()), fqn


@pytest.mark.subprocess
@pytest.mark.exhaustive
def test_a_save_that_is_killed_leaves_the_previous_checkpoint_or_the_new_one(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    here = Path(__file__).parent
    code = SAVER.format(tests=str(here.parent), here=str(here), root=str(tmp_path))
    number = 1
    for kill in range(10):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(kill), str(number)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        out = processes[0].stdout
        assert out is not None
        for _ in range(3):
            number = int(out.readline())
        time.sleep(0.02 * kill)
        processes[kill % 2].send_signal(signal.SIGKILL)
        time.sleep(0.2)
        for process in processes:
            process.kill()
            process.communicate()
        rank_pool.run(1, __file__, "check_is_complete", {"root": str(tmp_path / "checkpoint"), "least": number - 1})
