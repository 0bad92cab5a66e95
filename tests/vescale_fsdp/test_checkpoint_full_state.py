"""Full state dicts: sliced by every rank or sent by rank 0, with `assign` or without, never in the place of a shard."""

from __future__ import annotations

import io
from typing import Any

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

from vescale_fsdp import fully_shard


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
def test_rank_0_sends_a_full_state_dict_and_a_key_too_many_is_all_ranks_error() -> None:
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
    extra = expected | {"stranger": torch.ones(2)}
    with pytest.raises(Exception, match="stranger"):
        set_model_state_dict(model, extra if dist.get_rank() == 0 else {}, options=options)


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of live storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if type(tensor) is not torch.Tensor:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            given = [each for each in args if isinstance(each, torch.Tensor)]
            if key in self._seen or any(each.untyped_storage()._cdata == key for each in given):
                continue
            self._seen.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


@ranks(2)
def test_loading_from_rank_0_needs_about_one_tensor_beyond_the_shards() -> None:
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    states = {fqn: value + 1 for fqn, value in layers.state_dict().items()}
    for layer in layers:
        fully_shard(layer)
    model = fully_shard(layers)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with Counted() as counted:
        set_model_state_dict(model, states if dist.get_rank() == 0 else {}, options=options)
    assert counted.peak <= 3 * 64 * 64 * 4
    for fqn, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert param.full_tensor().shape == (64, 64), fqn
