"""Training on this rank: the same loop for every engine, from the first batch to the sample of generated text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.demo.data import Corpus
from vescale_fsdp.demo.engines import ENGINES, Group
from vescale_fsdp.demo.meter import StepMeter
from vescale_fsdp.demo.model import GPT, generate, make_model
from vescale_fsdp.demo.optimizers import make_optimizer
from vescale_fsdp.demo.settings import Dtype, Settings

__all__ = ["Outcome", "Trainer", "Watcher", "train"]

MAX_GRAD_NORM = 1.0
NUM_HELD_OUT_WINDOWS = 256
PROMPT = b"def "
NUM_SAMPLED = 200


@dataclass
class Outcome:
    """What a run came to; equal on every rank, but for the sample, which rank 0 draws."""

    losses: list[float] = field(default_factory=list)
    val_bits_per_byte: float = math.nan
    tokens_per_s: float = 0.0
    peak_bytes: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    wire_bytes: int = 0
    groups: tuple[Group, ...] = ()
    num_parameters: int = 0
    sample: bytes = b""

    @property
    def padding_pct(self) -> float:
        """Padding in percent of the parameters."""
        return 100 * sum(group.padding for group in self.groups) / sum(group.numel for group in self.groups)


class Watcher(Protocol):
    """Told after every step, on one rank."""

    def stepped(self, outcome: Outcome) -> None: ...


def train(settings: Settings, corpus: Corpus, watcher: Watcher | None = None) -> Outcome:
    """Train as `settings` say; needs the default process group (of `settings.ranks` ranks) unless ranks is 1."""
    trainer = Trainer(settings, corpus)
    for _ in trainer.steps():
        if watcher is not None:
            watcher.stepped(trainer.outcome)
    trainer.conclude()
    return trainer.outcome


class Trainer:
    """A wrapped model, its optimizer, and what came of them so far."""

    def __init__(self, settings: Settings, corpus: Corpus) -> None:
        self.settings, self.corpus = settings, corpus
        self.rank = dist.get_rank() if settings.ranks > 1 else 0
        self.engine = ENGINES[settings.engine]
        self.model = make_model(settings)
        self.outcome = Outcome(num_parameters=sum(param.numel() for param in self.model.parameters()))
        self.wrapped = self.engine.wrap(self.model, settings)
        self.optimizer = make_optimizer(self.model, settings)
        if settings.resume:
            self._resume()

    def _resume(self) -> None:
        """Model, optimizer and losses of the steps that are done; at any number of ranks, and under any engine."""
        s = self.settings
        assert s.checkpoint is not None
        self.outcome.losses = load(s.checkpoint, self.model, self.optimizer, verify=True)["losses"]
        if len(self.outcome.losses) >= s.steps:
            done = len(self.outcome.losses)
            raise ValueError(f"{s.checkpoint} holds step {done} already; ask for more than --steps {s.steps}")

    def steps(self) -> Iterator[None]:
        """Step by step. The third runs under the meter: before it optimizer state and DDP's buckets settle."""
        first = len(self.outcome.losses)
        metered = min(first + 2, self.settings.steps - 1)
        busy_s, num_timed = 0.0, 0
        for step in range(first, self.settings.steps):
            start_s = time.perf_counter()
            loss = self._metered_step(step) if step == metered else self._step(step, nullcontext())
            self.outcome.losses.append(self._mean(loss))
            if step > metered or self.settings.steps - first <= 3:
                busy_s += time.perf_counter() - start_s
                num_timed += 1
                self.outcome.tokens_per_s = num_timed * self.settings.tokens_per_step / busy_s
            if self.settings.checkpoint is not None and self.settings.saves_after(step + 1):
                save(self.settings.checkpoint, self.model, self.optimizer, extra={"losses": self.outcome.losses})
            yield

    def conclude(self) -> None:
        """Validate, describe the plan, and write a sample."""
        self.outcome.groups = self.engine.groups(self.model)
        self.outcome.val_bits_per_byte = self._validate()
        whole = self._gather()
        if self.rank == 0:
            self.outcome.sample = generate(whole, PROMPT, NUM_SAMPLED, seed=self.settings.seed)

    def _metered_step(self, step: int) -> Tensor:
        meter = StepMeter(self.settings.ranks)
        loss = self._step(step, meter)
        self.outcome.collectives, self.outcome.wire_bytes = dict(meter.collectives), meter.wire_bytes
        peak = torch.tensor(meter.peak_bytes)
        if self.settings.ranks > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.outcome.peak_bytes = int(peak)
        return loss

    def _step(self, step: int, watched: AbstractContextManager[object]) -> Tensor:
        """One update; the local mean loss before it."""
        s = self.settings
        batch = self.corpus.batch(step, batch=s.batch, seq=s.seq, seed=s.seed)
        batch = batch[self.rank * s.rank_batch : (self.rank + 1) * s.rank_batch]
        for group in self.optimizer.param_groups:
            group["lr"] = s.lr * _lr_factor(step, s.steps)
        with watched:
            loss = self._loss(batch).mean()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, batch: Tensor) -> Tensor:
        """Cross entropy of every byte after the first, in nats: (B, T)."""
        autocast = self.settings.dtype is Dtype.BF16 and not self.engine.casts
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits_BTV = self.wrapped(batch[:, :-1])
        return F.cross_entropy(logits_BTV.float().transpose(1, 2), batch[:, 1:], reduction="none")

    def _mean(self, loss: Tensor) -> float:
        """The mean over ranks, which hold equal parts of the batch."""
        total = loss.double()
        if self.settings.ranks > 1:
            dist.all_reduce(total)
        return float(total) / self.settings.ranks

    @torch.no_grad()
    def _validate(self) -> float:
        """Bits per byte on held-out windows. Every rank runs equally many, as its collectives need; repeats weigh 0."""
        s = self.settings
        windows = self.corpus.held_out_windows(NUM_HELD_OUT_WINDOWS, s.seq)
        weights = torch.ones(len(windows), dtype=torch.float64)
        spare = -len(windows) % s.batch
        windows = torch.cat([windows, windows[:1].expand(spare, -1)])
        weights = torch.cat([weights, weights.new_zeros(spare)])
        totals = torch.zeros(2, dtype=torch.float64)
        for begin in range(self.rank * s.rank_batch, len(windows), s.batch):
            part = slice(begin, begin + s.rank_batch)
            nats = self._loss(windows[part]).double().mean(1)
            totals += torch.stack([(nats * weights[part]).sum(), weights[part].sum()])
        if s.ranks > 1:
            dist.all_reduce(totals)
        return float(totals[0] / totals[1]) / math.log(2)

    @torch.no_grad()
    def _gather(self) -> GPT:
        """An unsharded copy, made by every rank together: sampling byte by byte needs no collective then."""
        whole = make_model(self.settings)
        values = {fqn: full(param) for fqn, param in self.model.named_parameters()}
        for fqn, param in whole.named_parameters():
            param.copy_(values[fqn])
        return whole


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor; a plain tensor is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth (at most 50 steps), then a cosine down to a tenth."""
    warmup = max(1, min(50, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
