"""The demo's promise: the same losses as one process that shards nothing, at any number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch.distributed.tensor import DTensor

from vescale_fsdp.demo.data import Corpus
from vescale_fsdp.demo.engines import ENGINES
from vescale_fsdp.demo.loop import Outcome, Trainer
from vescale_fsdp.demo.model import make_model
from vescale_fsdp.demo.settings import Dtype, EngineName, Settings

SMALL = Settings(engine=EngineName.SINGLE, ranks=1, steps=30, batch=12, seq=16, layers=2, dim=24, heads=2)
CORPUS = Corpus.read((Path(dataclasses.__file__), Path(torch.__file__)), SMALL.seq)


def over_ranks(engine: EngineName, **changes: object) -> Settings:
    return dataclasses.replace(SMALL, engine=engine, ranks=dist.get_world_size(), **changes)  # type: ignore[arg-type]


def run(settings: Settings) -> Outcome:
    trainer = Trainer(settings, CORPUS)
    for _ in trainer.steps():
        pass
    return trainer.outcome


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Relative, over all steps."""
    assert len(ours) == len(theirs)
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("tied", [False, True])
def test_losses_equal_those_of_one_process(tied: bool) -> None:
    alone = run(dataclasses.replace(SMALL, tied=tied))
    sharded = run(over_ranks(EngineName.VESCALE, tied=tied))
    assert largest_difference(sharded.losses[:20], alone.losses[:20]) < 1e-6
    assert largest_difference(sharded.losses[20:], alone.losses[20:]) < 1e-5
    assert alone.losses[-1] < 0.9 * alone.losses[0]


@ranks(3)
@pytest.mark.parametrize("engine", [EngineName.FSDP2, EngineName.DDP])
def test_losses_of_torchs_own_engines_equal_those_of_one_process(engine: EngineName) -> None:
    alone = run(SMALL)
    assert largest_difference(run(over_ranks(engine)).losses[:20], alone.losses[:20]) < 1e-6


@ranks(2)
@pytest.mark.parametrize("dtype", list(Dtype))
def test_gradients_equal_fsdp2s_bit_for_bit(dtype: Dtype) -> None:
    ours, theirs = (gradients(over_ranks(engine, dtype=dtype)) for engine in (EngineName.VESCALE, EngineName.FSDP2))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[fqn], theirs[fqn]) for fqn in ours)
    assert all(gradient.any() for gradient in ours.values())


def gradients(settings: Settings) -> dict[str, torch.Tensor]:
    model = make_model(settings)
    wrapped = ENGINES[settings.engine].wrap(model, settings)
    mine = CORPUS.batch(0, batch=settings.batch, seq=settings.seq, seed=0).chunk(settings.ranks)[dist.get_rank()]
    logits_BTV = wrapped(mine[:, :-1]).float()
    torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), mine[:, 1:].flatten()).backward()
    return {fqn: full(param.grad) for fqn, param in model.named_parameters()}


def full(gradient: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


@ranks(2)
def test_the_meter_counts_what_fsdp2_and_ddp_send() -> None:
    """Worked by hand for 2 ranks, 4 bytes: half of a group per gather (blocks twice, root once) and per reduction."""
    block, root, num_tensors = 12 * 24 * 24 + 2 * 24, 2 * 256 * 24 + 24, 15
    fsdp2 = run(over_ranks(EngineName.FSDP2, steps=4))
    assert fsdp2.collectives == {"_allgather_base_": 5, "_reduce_scatter_base_": 3, "all_reduce": 1}
    assert fsdp2.wire_bytes == 2 * (2 * 3 * block + 2 * root) + 4 * num_tensors  # clipping all-reduces the norms
    ddp = run(over_ranks(EngineName.DDP, steps=4))
    assert ddp.collectives == {"allreduce_": 1}
    assert ddp.wire_bytes == 4 * (2 * block + root)


@ranks(2)
def test_vescale_makes_the_collectives_that_fsdp2_makes() -> None:
    ours, fsdp2 = (run(over_ranks(engine, steps=4)) for engine in (EngineName.VESCALE, EngineName.FSDP2))
    assert ours.collectives == fsdp2.collectives
    assert ours.wire_bytes == pytest.approx(fsdp2.wire_bytes, rel=0.01)  # ours aligns each share to 16 bytes
