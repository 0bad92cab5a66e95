"""State between live models: torch's fully_shard to ours and back without whole tensors, and weights out in buckets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import ranks
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import CheckpointError, fully_shard, iterate_tensors, transfer_state
from vescale_fsdp.demo.meter import StepMeter

Wrap = Callable[[nn.Module], nn.Module]


class Tied(nn.Module):
    def __init__(self, rows: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.mix = nn.Linear(6, 7)
        self.head = nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def plain(seed: int, rows: int = 11) -> Tied:
    torch.manual_seed(seed)
    return Tied(rows)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = (parameter * 3).sin().detach()
    optimizer.step()
    optimizer.zero_grad()


@ranks(3)
@pytest.mark.parametrize("direction", ["from fsdp2", "to fsdp2", "to single"])
def test_training_goes_on_under_the_other_engine_bit_for_bit(direction: str) -> None:
    wraps: dict[str, tuple[Wrap, Wrap]] = {
        "from fsdp2": (fsdp2, fully_shard),
        "to fsdp2": (fully_shard, fsdp2),
        "to single": (fully_shard, lambda model: model),
    }
    source, target = (wrap(plain(seed)) for wrap, seed in zip(wraps[direction], (1, 2), strict=True))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1 * n) for n, model in enumerate((source, target), 1)]
    train(source, optimizers[0])
    source.count.fill_(7)
    with CommDebugMode() as comms:
        transfer_state(source, target, *optimizers)
    assert target.count == 7
    if direction != "to single":
        assert not any("all_gather" in str(op) for op in comms.get_comm_counts()), comms.get_comm_counts()
    for model, optimizer in zip((source, target), optimizers, strict=True):
        train(model, optimizer)
    for (fqn, one), other in zip(source.named_parameters(), target.parameters(), strict=True):
        assert torch.equal(whole(one), whole(other)), fqn


@ranks(2)
def test_models_that_differ_are_named_and_left_as_they_were() -> None:
    source, target = fsdp2(plain(1)), fully_shard(plain(2, rows=12))
    before = whole(target.mix.weight)
    with pytest.raises(CheckpointError, match=r"model.embed.weight: source \(11, 6\), target \(12, 6\)"):
        transfer_state(source, target)
    assert torch.equal(whole(target.mix.weight), before)


@ranks(3)
def test_buckets_hold_every_tensor_once_and_no_more_than_asked() -> None:
    model, expected = fully_shard(plain(1)), plain(1).state_dict()
    buckets = list(iterate_tensors(model, bucket_nbytes=280, dtype=torch.bfloat16))
    found = {fqn: tensor for bucket in buckets for fqn, tensor in bucket.items()}
    assert sorted(fqn for bucket in buckets for fqn in bucket) == sorted(
        fqn for fqn in expected if fqn != "head.weight"
    )
    assert all(sum(tensor.nbytes for tensor in bucket.values()) <= 280 for bucket in buckets)
    assert len(buckets) == 1
    assert len(list(iterate_tensors(model, bucket_nbytes=100))) == 4
    for fqn, tensor in found.items():
        wanted = expected[fqn]
        assert torch.equal(tensor, wanted.bfloat16() if wanted.is_floating_point() else wanted), fqn


@ranks(2)
def test_sharded_tensors_come_without_communication() -> None:
    model = fully_shard(plain(1))
    with CommDebugMode() as comms:
        (bucket,) = iterate_tensors(model, whole=False)
    assert comms.get_total_counts() == 0
    assert isinstance(bucket["embed.weight"], DTensor)


@ranks(2)
def test_whole_tensors_take_the_memory_of_a_few_buckets_and_not_of_the_model() -> None:
    width, depth = 64, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    meter, bucket_nbytes = StepMeter(2), 4 * width * width
    with meter:
        torch.zeros(1)
        before = meter.peak_bytes
        for bucket in iterate_tensors(model, bucket_nbytes=bucket_nbytes):
            assert len(bucket) == 1
    assert bucket_nbytes <= meter.peak_bytes - before < 5 * bucket_nbytes


@ranks(2, 3)
def test_chunks_of_rows_three_five_and_seven_lie_where_the_plain_tensors_do() -> None:
    """C44: one padded buffer: offsets are those of the tensors, not of the buffer; three ranks cut inside a tensor."""
    model = nn.ModuleDict({str(rows): nn.Linear(4, rows, bias=False) for rows in (3, 5, 7)})
    whole = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    root = nn.Sequential(model)
    root.forward = lambda x: x
    fully_shard(root)
    for fqn, param in root.named_parameters():
        found = [(chunk.offsets, chunk.sizes) for chunk in param.__create_chunk_list__()]
        everyone: list[list[tuple[torch.Size, torch.Size]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, found)
        covered = torch.zeros(param.shape)
        for offsets, sizes in (box for boxes in everyone for box in boxes):
            covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert bool((covered == 1).all())
        for offsets, sizes in found:
            box = param.__get_tensor_shard__(MetadataIndex(fqn, offsets))
            slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert torch.equal(box, whole[fqn.removeprefix("0.")][slices])
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(dict(root.named_parameters()), checkpoint_id=folder[0])
    alone = {f"0.{fqn}": torch.zeros_like(value) for fqn, value in whole.items()}
    dcp.load(alone, checkpoint_id=folder[0], no_dist=True)
    assert all(torch.equal(alone[f"0.{fqn}"], value) for fqn, value in whole.items())
