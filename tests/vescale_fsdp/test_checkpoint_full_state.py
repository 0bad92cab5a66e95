"""Full state dicts: sliced by every rank or sent by rank 0, with `assign` or without, never in the place of a shard."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import CheckpointError, fully_shard, load_full_state
from vescale_fsdp.demo.meter import StepMeter


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(tokens)))


def wrapped(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(Tied())


def full_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Tied().state_dict()


def assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for fqn, param in model.named_parameters(remove_duplicate=False):
        assert isinstance(param, DTensor), fqn
        assert torch.equal(param.full_tensor(), expected[fqn]), fqn
    assert model.head.weight is model.embed.weight


@ranks(3)
@pytest.mark.parametrize("assign", [False, True])
def test_raw_loading_of_full_tensors_slices_them_without_communication(assign: bool) -> None:
    model, expected = wrapped(1), full_state(2)
    params = list(model.parameters())
    with CommDebugMode() as comms:
        model.load_state_dict(expected, assign=assign)
    assert comms.get_total_counts() == 0
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    assert_holds(model, expected)
    assert torch.isfinite(model(torch.arange(8))).all()


@ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_a_full_tensor_of_another_shape_is_named_and_no_shard_is_replaced(assign: bool) -> None:
    model = wrapped(1)
    wrong = full_state(2) | {"mix.weight": torch.ones(6, 7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for mix.weight"):
        model.load_state_dict(wrong, assign=assign)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    missing = {key: value for key, value in full_state(2).items() if key != "mix.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"mix.bias"'):
        model.load_state_dict(missing, assign=assign)


@ranks(2)
def test_full_tensors_fill_a_model_on_the_meta_device_when_assigned() -> None:
    with torch.device("meta"):
        model = fully_shard(Tied())
    expected = full_state(2)
    model.load_state_dict(expected, assign=True)
    assert_holds(model, expected)


@ranks(3)
def test_names_that_rank_0_lacks_or_has_too_many_are_every_ranks_error_before_anything_changes() -> None:
    """C47: by name, on all ranks together."""
    model = wrapped(1)
    before = model.mix.weight.full_tensor()
    given = full_state(2) | {"stranger": torch.ones(2), "mix.weight": torch.ones(2, 2)}
    del given["mix.bias"]
    with pytest.raises(CheckpointError) as found:
        load_full_state(model, given if dist.get_rank() == 0 else {})
    for text in [
        "stranger: in the state dict, not in the model",
        "mix.bias: in the model, not in the state dict",
        "mix.weight: expected shape (6, 6), the state dict has (2, 2)",
    ]:
        assert text in str(found.value)
    assert torch.equal(model.mix.weight.full_tensor(), before)


@ranks(3)
def test_of_tied_names_one_is_enough() -> None:
    """C47: a tied name is no missing one."""
    model, expected = wrapped(1), full_state(2)
    one_name = {key: value for key, value in expected.items() if key != "head.weight"}
    load_full_state(model, one_name if dist.get_rank() == 0 else {})
    assert_holds(model, expected)


@ranks(3)
def test_rank_0_sends_a_full_state_dict_and_a_gathered_one_is_saved_by_torch_save() -> None:
    """A21: an unsharded state dict of torch.save, and back to one."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    expected = full_state(2)
    model = wrapped(1)
    set_model_state_dict(model, dict(expected) if dist.get_rank() == 0 else {}, options=options)
    assert_holds(model, expected)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    file = io.BytesIO()
    torch.save(gathered, file)
    plain = Tied()
    plain.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(plain.embed.weight, expected["embed.weight"])


@ranks(2)
@pytest.mark.parametrize("call", ["torch's", "ours"])
def test_what_rank_0_sends_takes_a_few_tensors_beside_the_shards(call: str) -> None:
    """C49. One, and what gloo has not let go of yet; the model has twelve."""
    width = 128
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(12)))
    state = {fqn: torch.randn(width, width) for fqn in model.state_dict()} if dist.get_rank() == 0 else {}
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    meter = StepMeter(2)
    with meter:
        torch.zeros(1)
        before = meter.peak_bytes
        if call == "ours":
            load_full_state(model, state)
        else:
            set_model_state_dict(model, state, options=options)
    assert meter.peak_bytes - before < 4 * width * width * 4, meter.peak_bytes - before


@ranks(2)
@pytest.mark.parametrize("call", ["torch's", "ours"])
def test_a_model_on_the_meta_device_never_holds_its_shards_twice(call: str) -> None:
    """C49, for a model without memory."""
    width, depth = 128, 12
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    params = list(model.parameters())
    state = {fqn: torch.full((width, width), 2.0) for fqn in model.state_dict()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    tensor, meter = 4 * width * width, StepMeter(2)
    with meter:
        torch.zeros(1)
        before = meter.peak_bytes
        if call == "ours":
            load_full_state(model, state)
        else:
            set_model_state_dict(model, state, options=options)
    assert meter.peak_bytes - before < depth * tensor / 2 + 4 * tensor, meter.peak_bytes - before
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    assert all(bool((param.full_tensor() == 2).all()) for param in model.parameters())
    assert torch.isfinite(model(torch.ones(1, width))).all()


@ranks(3)
def test_a_group_of_several_parameters_on_the_meta_device_takes_the_memory_they_were_placed_in() -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with torch.device("meta"):
        model = fully_shard(Tied())
    for seed in (2, 3):  # the second time, it is on the meta device no more
        expected = full_state(seed)
        set_model_state_dict(model, dict(expected) if dist.get_rank() == 0 else {}, options=options)
        assert_holds(model, expected)
    (group,) = model._get_fsdp_state().groups
    buffer = group.shards.buffer.flat.untyped_storage().data_ptr()
    locals_ = [param.to_local() for param in model.parameters()]
    assert all(local.untyped_storage().data_ptr() == buffer for local in locals_ if local.numel())
    assert torch.isfinite(model(torch.arange(8))).all()
    with torch.device("meta"):
        twin = fully_shard(Tied())
    twin.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        model.mix.weight.zero_()
    assert torch.equal(twin.mix.weight.full_tensor(), full_state(3)["mix.weight"])  # values, not the other's memory
