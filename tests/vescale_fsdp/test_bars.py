"""What a step copies, sends and holds, counted exactly and compared with torch's FSDP2 on the same model.

The models are smaller ones of the shapes that benchmarks/step.py times: a dense GPT whose parameters outweigh its few
tokens, fused experts whose number does not divide by the ranks, odd sizes. Counts need no second rank: rank 0 of a
group of the fake backend, which moves nothing, runs the same operations.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt_models import GPT, Shape
from live_bytes import LiveBytes, live_now
from ranks import ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.optim import flat

DENSE = Shape(6, 80, 10, 320, 1344, length=8)
SIX_EXPERTS = Shape(3, 64, 4, 128, 384, length=8, experts=6)
THREE_EXPERTS = Shape(3, 64, 4, 128, 384, length=8, experts=3)
ODD = Shape(2, 65, 5, 261, 3141, length=9)
VOCABULARY = Shape(4, 195, 5, 781, 50257, length=17)
"""At its real size: small reductions take no portions."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

WRITES_FIRST_ARGUMENT = {"copy_", "_foreach_copy_"}
WRITES_RESULT = {"clone", "_to_copy", "cat", "stack", "contiguous", "_chunk_cat", "index_select"}
WRITES_OUT = {"cat", "_chunk_cat", "split_with_sizes_copy", "chunk_cat"}


class Counter(LiveBytes):
    """Counts the bytes that data-movement operations write, too; what gloo copies while it is waited for, is gloo's."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and not self._is_waiting:
            self.copied += _written(func.overloadpacket.__name__, func.namespace, args, kwargs or {}, out)
        return out

    @property
    def on_the_wire(self) -> int:
        """Bytes of whole tensors that travelled; a ring sends (W-1)/W of them."""
        return sum(self.nbytes.values())


def _written(name: str, namespace: str, args: Any, kwargs: Any, out: Any) -> int:
    if namespace == "fsdp" and name == "all_gather_copy_in":
        return _nbytes(args[0])
    if name in WRITES_OUT and kwargs.get("out") is not None:
        return _nbytes(kwargs["out"])
    if name in WRITES_FIRST_ARGUMENT:
        return _nbytes(args[0])
    return _nbytes(out) if name in WRITES_RESULT else 0


def _nbytes(value: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(value) if isinstance(each, torch.Tensor))


@dataclass
class Step:
    """The third step of an engine: everything that it counted, and what forward alone copied."""

    copied: int
    copied_in_forward: int
    wire: int
    calls: int
    peak: int
    gradients: int


def wrapped(
    shape: Shape, engine: Callable[..., object] | None, *, is_flat: bool = False, **policy: Any
) -> tuple[Any, torch.optim.Optimizer, Callable[[int], None]]:
    """A model, its AdamW, and a step of both. `engine` None: the model whole on this rank."""
    torch.manual_seed(0)
    model = GPT(shape)
    if engine is not None:
        for block in model.blocks:
            engine(block, **policy)
        engine(model, **policy)
    elif policy:
        model.to(torch.bfloat16)
    optim: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    optim = flat(optim, model) if is_flat else optim

    def step(number: int) -> None:
        model.loss(number, dist.get_rank()).backward()
        optim.step()
        optim.zero_grad()

    return model, optim, step


def run(shape: Shape, engine: Callable[..., object] | None, *, is_flat: bool = False, **policy: Any) -> Step:
    """Train two steps, then count forward alone and a whole step."""
    gc.collect()
    before = live_now()
    model, _, step = wrapped(shape, engine, is_flat=is_flat, **policy)
    for number in range(2):
        step(number)
    with Counter() as forward, torch.no_grad():
        model.loss(2, dist.get_rank())
    if engine is not None:
        model.reshard()
    with Counter() as meter:
        step(3)
    gradients = sum(param.numel() * param.itemsize for param in model.parameters())
    calls = sum(meter.calls.values())
    return Step(meter.copied, forward.copied, meter.on_the_wire, calls, meter.peak - before, gradients)


def on_rank_0_of(num_ranks: int) -> None:
    """Replace the process group."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


def three(shape: Shape, num_ranks: int, **policy: Any) -> tuple[Step, Step, Step]:
    """Ours, FSDP2 and the plain model, on rank 0 of `num_ranks`."""
    on_rank_0_of(num_ranks)
    ours = run(shape, fully_shard, is_flat=True, **policy)
    return ours, run(shape, torch_fully_shard, **policy), run(shape, None, **policy)


def engine_copies(engine: Step, plain: Step) -> int:
    return engine.copied - plain.copied


@ranks(1)
def test_nothing_is_copied_around_a_gather_and_each_gradient_once() -> None:
    ours, theirs, plain = three(DENSE, 2)
    assert ours.copied_in_forward == plain.copied_in_forward < theirs.copied_in_forward
    assert engine_copies(ours, plain) <= plain.gradients
    assert engine_copies(ours, plain) <= 0.29 * engine_copies(theirs, plain)
    assert ours.peak <= theirs.peak


@ranks(1)
def test_casting_parameters_copies_little_more_than_half_of_fsdp2s() -> None:
    ours, theirs, plain = three(DENSE, 2, mp_policy=BF16)
    assert engine_copies(ours, plain) <= 0.55 * engine_copies(theirs, plain)


@pytest.mark.parametrize(
    ("shape", "copies", "wire", "peak"),
    [(SIX_EXPERTS, 0.24, 0.79, 0.78), (THREE_EXPERTS, 0.25, 0.81, 0.82)],
    ids=["six experts", "three experts"],
)
@ranks(1)
def test_experts_that_do_not_divide_by_the_ranks_are_not_padded(
    shape: Shape, copies: float, wire: float, peak: float
) -> None:
    ours, theirs, plain = three(shape, 4)
    assert ours.copied_in_forward == plain.copied_in_forward
    assert engine_copies(ours, plain) <= copies * engine_copies(theirs, plain)
    assert ours.wire <= wire * theirs.wire
    assert ours.calls <= theirs.calls
    assert ours.peak <= peak * theirs.peak


@ranks(1)
def test_the_peak_of_odd_sizes_in_bfloat16_is_well_below_fsdp2s() -> None:
    on_rank_0_of(2)
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        ours = run(VOCABULARY, fully_shard, is_flat=True, mesh=mesh, mp_policy=BF16)
        theirs = run(VOCABULARY, torch_fully_shard, mesh=mesh, mp_policy=BF16)
    assert ours.peak <= 0.82 * theirs.peak


@ranks(1)
def test_parameters_and_two_moments_take_their_share_of_twelve_bytes_an_element() -> None:
    for size in (2, 3, 4, 8):
        on_rank_0_of(size)
        for shape in (DENSE, SIX_EXPERTS, THREE_EXPERTS, ODD):
            before = live_now()
            model, optim, step = wrapped(shape, fully_shard, is_flat=True)
            numel = sum(param.numel() for param in model.parameters())
            step(0)
            gc.collect()
            assert live_now() - before <= 1.005 * 12 * numel / size, (shape, size)
            del model, optim, step
            gc.collect()


@ranks(1)
def test_a_model_without_memory_trains_over_ranks_that_do_not_exist() -> None:
    on_rank_0_of(256)
    mesh = init_device_mesh("cpu", (256,))
    with FakeTensorMode():
        _, _, step = wrapped(SIX_EXPERTS, fully_shard, mesh=mesh)
        step(0)
