"""A reduction's input in portions: every element once, each rank's share apart, results and bytes as without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrapping import full, wrapped

from vescale_fsdp import MixedPrecisionPolicy, fully_shard, traffic
from vescale_fsdp.group import gradients
from vescale_fsdp.group.portions import Portion, cut_into_portions
from vescale_fsdp.layout import LanePlan, Layout

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

DRAWN = Layout(2, 4, 4, (LanePlan(8, 8),), (0, 0), (0, 12), 8)
"""The layout of the drawing in portions.py: |aaaaaaaa|aa..bbbb|."""


def drawing(portion: Portion, names: str, share: int) -> str:
    shown = ["."] * sum(portion.lane_numels)
    for name, blocks in zip(names, portion.blocks, strict=True):
        for block in blocks:
            shown[block.span.begin : block.span.end] = name * len(block.span)
    return "|".join(["", *("".join(shown[i : i + share]) for i in range(0, len(shown), share)), ""])


def test_portions_are_those_of_the_drawing() -> None:
    first, second = cut_into_portions(DRAWN, (10, 4), 2, align=4)
    assert drawing(first, "ab", 4) == "|aaaa|aa..|"
    assert drawing(second, "ab", 4) == "|aaaa|bbbb|"


@pytest.mark.parametrize("num_portions", [1, 2, 3, 8])
def test_portions_hold_every_element_where_its_rank_expects_it(num_portions: int) -> None:
    layout = Layout(6, 1, 1, (LanePlan(7, 7), LanePlan(4, 4)), (0, 1, 0, 0, 1), (0, 2, 1, 40, 9), 11)
    numels = (1, 6, 38, 0, 15)
    found: dict[tuple[int, int], int] = {}
    for portion in cut_into_portions(layout, numels, num_portions, align=2):
        for i, blocks in enumerate(portion.blocks):
            for block in blocks:
                for row in range(block.rows):
                    for column in range(block.width):
                        element = block.begin + row * block.stride + column
                        place = block.target + row * block.width + column
                        assert (i, element) not in found
                        found[i, element] = _in_whole(layout, portion, place)
    assert found == {
        (i, element): (0, 42)[layout.lane_of[i]] + layout.starts[i] + element
        for i, numel in enumerate(numels)
        for element in range(numel)
    }


def _in_whole(layout: Layout, portion: Portion, place: int) -> int:
    """Where an element of the portion lies in the whole, lane after lane, share after share."""
    base = 0
    for lane, columns, numel in zip(layout.lanes, portion.columns, portion.lane_numels, strict=True):
        if place < numel:
            rank, column = divmod(place, len(columns))
            return base + rank * lane.share + columns.begin + column
        place, base = place - numel, base + layout.num_ranks * lane.share
    raise AssertionError(place)


@pytest.mark.parametrize(("size", "expected"), [(2, 8), (3, 6), (4, 4), (6, 3), (8, 2), (256, 2)])
def test_a_portion_takes_the_place_of_the_gathered_parameters(size: int, expected: int) -> None:
    layout = Layout(size, 4, 4, (LanePlan(2**24, 2**24),), (0,), (0,), 2**24)
    assert gradients.num_portions(layout, torch.float32, torch.bfloat16) == expected
    assert gradients.num_portions(layout, torch.float32, torch.float32) == 1
    assert gradients.num_portions(layout, torch.bfloat16, torch.bfloat16) == 1
    small = Layout(size, 4, 4, (LanePlan(2**12, 2**12),), (0,), (0,), 2**12)
    assert gradients.num_portions(small, torch.float32, torch.bfloat16) == 1


@pytest.mark.parametrize(("share_nbytes", "expected"), [(2**20, 2), (2**19, 1)])
def test_shares_of_many_ranks_that_are_small_are_reduced_at_once(share_nbytes: int, expected: int) -> None:
    share = share_nbytes // 4
    layout = Layout(1024, 4, 4, (LanePlan(share, share),), (0,), (0,), share)
    assert gradients.num_portions(layout, torch.float32, torch.bfloat16) == expected


@ranks(1)
def test_on_many_ranks_two_portions_are_as_large_as_the_gathered_parameters() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = nn.Linear(9, 13)
    with portions_of_everything():
        fully_shard(model, mp_policy=BF16)
        model(torch.ones(1, 9)).sum().backward()
    (group,) = model._get_fsdp_state().groups
    assert [each.buffer.nbytes for each in group.reduction._gradients.inputs] == [group._whole.nbytes] * 2


@contextmanager
def portions_of_everything() -> Iterator[None]:
    """Small reductions take portions, too."""
    before = gradients.MIN_NBYTES
    gradients.MIN_NBYTES = 0
    try:
        yield
    finally:
        gradients.MIN_NBYTES = before


class Twice(nn.Module):
    """A tied head, and a block that runs twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))])
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.blocks[0](self.embed(x))))


def gradients_after(kind: type[nn.Module], *, held: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Of two backward passes, with the first held or reduced apart; and how many reductions there were."""
    torch.manual_seed(1)
    model = wrapped(kind(), fully_shard, mp_policy=BF16)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1 or not held)
        model(batch(step, 4, dist.get_rank())).float().square().mean().backward()
    grads = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    return grads, traffic(model).reduces


@pytest.mark.parametrize("held", [False, True], ids=["each", "held"])
@pytest.mark.parametrize("kind", [Tower, Odd, Twice])
@ranks(1, 2, 3, 4)
def test_gradients_are_the_same_bits_in_portions(kind: type[nn.Module], held: bool) -> None:
    at_once, calls = gradients_after(kind, held=held)
    with portions_of_everything():
        in_portions, more_calls = gradients_after(kind, held=held)
    assert more_calls == {1: 0, 2: 8, 3: 6, 4: 4}[dist.get_world_size()] * calls
    assert at_once.keys() == in_portions.keys()
    one_by_one, _ = gradients_after(kind, held=False)
    for name, grad in in_portions.items():
        assert torch.equal(grad, at_once[name]), name
        torch.testing.assert_close(grad, one_by_one[name], rtol=1e-5, atol=1e-6)


class Chosen(nn.Module):
    """Each rank uses another of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.unshard()
        return self.blocks[dist.get_rank()](x)


@ranks(2)
def test_portions_of_what_a_rank_did_not_use_are_zeros() -> None:
    torch.manual_seed(1)
    reference = Chosen().bfloat16()
    torch.manual_seed(1)
    with portions_of_everything():
        model = wrapped(Chosen(), fully_shard, mp_policy=BF16)
        model.set_reduce_scatter_unused_params(True)
        model(batch(0, 2, dist.get_rank())).float().square().mean().backward()
    for rank, block in enumerate(reference.blocks):
        block(batch(0, 2, rank).bfloat16()).float().square().mean().backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(param.grad), other.grad.float() / 2)
