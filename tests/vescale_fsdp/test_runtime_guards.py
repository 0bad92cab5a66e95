"""Mistakes that used to hang, or to train nothing, are errors: what, where, how to fix; on all ranks alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Odd, Tower, batch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from wrapping import wrapped

from vescale_fsdp import VescaleError, fully_shard, traffic
from vescale_fsdp.preflight import DivergenceError


@ranks(2, 3)
def test_ranks_with_different_models_all_raise_the_first_difference_before_any_data_moves() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    model = wrapped(Tower(hidden=24 if last else 16))
    with pytest.raises(
        DivergenceError, match=rf"rank {dist.get_world_size() - 1} wrapped another model than rank 0"
    ) as error:
        model(batch(0, 1))
    assert "blocks.0" in str(error.value)
    assert traffic(model).collectives == 0
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(error.value))
    assert len(set(texts)) == 1


@ranks(2)
def test_an_error_while_wrapping_on_one_rank_is_raised_on_all() -> None:
    model = Tower()
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(torch.randn(8, 4).t())
    with pytest.raises(VescaleError, match=r"rank 1 of 2: NotImplementedError: head.weight: shape \(4, 8\) has stride"):
        wrapped(model)(batch(0, 1))


@ranks(2)
def test_an_error_on_every_rank_keeps_its_type() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    with pytest.raises(NotImplementedError, match="only contiguous parameters"):
        fully_shard(model)


@ranks(2)
def test_the_preflight_is_one_small_gather_and_happens_once() -> None:
    model = wrapped(Tower())
    counts = []
    for _ in range(2):
        with CommDebugMode() as mode, torch.no_grad():
            model(batch(0, 2))
        counts.append(mode.get_total_counts())
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    assert counts == [4, 3]


@ranks(2)
def test_an_optimizer_made_before_wrapping_raises_at_its_step() -> None:
    """C48: it would leave the weights unchanged."""
    model = nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(batch(0, 1, width=4)).sum().backward()
    with pytest.raises(
        VescaleError, match=r"SGD holds 2 parameters.*weight: it was made before fully_shard.*Make the opt"
    ):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.unshard()
    with pytest.raises(VescaleError, match="or while they were unsharded"):
        torch.optim.Adam(model.parameters()).step()


@ranks(2)
def test_calling_an_inner_module_names_it_and_the_remedy() -> None:
    model = wrapped(Tower())
    with pytest.raises(VescaleError, match=r"Linear with up.weight, up.bias was called outside the forward of Block"):
        model.blocks[0].up(batch(0, 1))
    model(batch(0, 1)).sum().backward()
    with pytest.raises(VescaleError, match="register_fsdp_forward_method"):
        model.embed(batch(0, 1))


@ranks(2)
def test_deepcopy_is_refused_with_a_remedy() -> None:
    with pytest.raises(VescaleError, match=r"cannot be copied with deepcopy.*state_dict"):
        copy.deepcopy(wrapped(Tower()))


@ranks(2)
def test_wrapping_twice_is_refused() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(VescaleError, match="was applied to this module before"):
        fully_shard(model)


@ranks(2)
def test_a_block_that_ran_before_its_root_is_refused_by_name() -> None:
    model = wrapped(Tower())
    model.blocks[1](batch(0, 1))
    with pytest.raises(RuntimeError, match=r"blocks.1: ran forward before its root module FSDPTower"):
        model(batch(0, 1))


@ranks(2)
def test_parameters_added_later_are_refused_by_name() -> None:
    model = wrapped(Tower())
    model.blocks[0].adapter = nn.Linear(8, 8)
    with pytest.raises(VescaleError, match=r"no fully_shard call manages.*blocks.0.adapter.weight.*ignored_params"):
        model(batch(0, 1))


@ranks(2)
def test_ignored_parameters_of_another_model_are_refused() -> None:
    model = wrapped(Tower(), ignored_params={nn.Parameter(torch.ones(3))})
    with pytest.raises(VescaleError, match=r"not in FSDPTower, of shapes \[\(3,\)\]"):
        model(batch(0, 1))


@ranks(2)
def test_meta_and_real_parameters_in_one_call_are_refused_by_name() -> None:
    model = Odd()
    model.mix = nn.Linear(3, 7, device="meta")
    with pytest.raises(VescaleError, match=r"meta device and others are not: \['mix.weight', 'mix.bias'\]"):
        fully_shard(model)


@ranks(1)
def test_containers_without_forward_are_refused() -> None:
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        fully_shard(nn.ModuleList([nn.Linear(1, 1)]))


@ranks(2)
def test_attributes_of_parameters_survive_wrapping_and_lost_hooks_are_named() -> None:
    model = nn.Linear(4, 4)
    model.weight.is_special = "yes"
    model.bias.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match=r"bias: 1 tensor hook"):
        fully_shard(model)
    assert model.weight.is_special == "yes"


@ranks(2)
def test_a_gradient_from_before_wrapping_is_named() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.warns(UserWarning, match=r"weight: its gradient"):
        fully_shard(model)
    assert model.weight.grad is None


@ranks(2)
def test_an_error_of_a_collective_names_group_and_module() -> None:
    class Broken:
        def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, **_: object) -> None:
            raise RuntimeError("connection closed by peer")

    model = wrapped(Tower())
    model.blocks[1].set_custom_all_gather(Broken())
    with pytest.raises(RuntimeError, match="connection closed by peer") as error:
        model(batch(0, 1))
    assert "while gathering group 'blocks.1' (blocks.1.norm.weight and 4 more)" in error.value.__notes__[0]
