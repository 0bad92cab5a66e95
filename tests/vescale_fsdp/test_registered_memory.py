"""A50: collectives in memory of a process group's own allocator, or symmetric memory; both are played on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from wrapping import full, wrapped

from vescale_fsdp import _torch, traffic


class Backend:
    """What a process group with an allocator looks like to torch's collectives: gloo's group with memory of its own."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def _get_backend(self, device: torch.device) -> Backend:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.given.append(torch.empty(numel, dtype=dtype, device=device))
        return self.given[-1]


class Sent(TorchDispatchMode):
    """Where the tensors of gathers and reductions lie."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: dict[str, set[int]] = {"allgather": set(), "reduce_scatter": set()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind, addresses in self.addresses.items():
            if func.namespace == "c10d" and kind in func.overloadpacket.__name__:
                tensors = (each for each in tree_leaves(args[:2]) if isinstance(each, torch.Tensor))
                addresses |= {each.untyped_storage().data_ptr() for each in tensors}
        return func(*args, **(kwargs or {}))


def step(model: nn.Module) -> Sent:
    with Sent() as sent:
        model(batch(0, 2, dist.get_rank())).square().mean().backward()
    return sent


def with_backend(model: nn.Module, backend: Backend) -> None:
    """Turn the allocator on in every wrapped module, as a backend that has one would let it."""
    with pytest.MonkeyPatch.context() as patch:
        real: Callable[..., Any] = _torch.process_group_comms
        patch.setattr(_torch, "process_group_comms", lambda group, device: real(backend, device))
        for module in (model, *model.blocks):
            module.set_allocate_memory_from_process_group_for_comm(True)


@ranks(2)
def test_every_gather_and_reduction_happens_in_memory_of_the_process_groups_allocator() -> None:
    backend, model, plain = Backend(), wrapped(Tower()), wrapped(Tower())
    plain.load_state_dict(model.state_dict())
    with_backend(model, backend)
    for each in (model, plain):
        step(each)  # the first exchanges plans
        each.zero_grad()
    sent = step(model)
    step(plain)
    given = {each.untyped_storage().data_ptr() for each in backend.given}
    assert all(addresses and addresses <= given for addresses in sent.addresses.values())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(mine.grad), full(other.grad))


@ranks(2)
def test_the_allocator_is_asked_for_the_gathered_and_the_reduced_and_nothing_else_is_copied() -> None:
    backend, model, plain = Backend(), wrapped(Tower()), wrapped(Tower())
    with_backend(model, backend)
    step(model)
    step(plain)
    shares = [group.plan.share for module in (model, *model.blocks) for group in groups_of(module)]
    root, *blocks = shares
    # The root is gathered once and a block twice; a reduction takes its input and its result.
    gathered = [2 * root] + [2 * share for share in blocks] * 2
    reduced = [numel for share in shares for numel in (2 * share, share)]
    assert sorted(each.numel() for each in backend.given) == sorted(gathered + reduced)
    # Into that memory and out of it: a share and the whole for each gather, the whole and a share for each reduction.
    more = traffic(model).copied_bytes - traffic(plain).copied_bytes
    assert more == 4 * (3 * sum(gathered) // 2 + 3 * sum(shares))
    assert traffic(model).wire_bytes == traffic(plain).wire_bytes


@ranks(2)
def test_turned_off_the_allocator_is_asked_no_more() -> None:
    backend, model = Backend(), wrapped(Tower())
    with_backend(model, backend)
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(False)
    sent = step(model)
    assert backend.given == []
    shards = {group.shards.buffer.flat.data_ptr() for each in (model, *model.blocks) for group in groups_of(each)}
    assert shards <= sent.addresses["allgather"]


def groups_of(module: Any) -> Sequence[Any]:
    return module._get_fsdp_state().groups


class Symmetric:
    """A collective of torch's kind whose memory is its own; it counts calls."""

    calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device)


class SymmetricGather(Symmetric, _torch.AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return _torch.all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduce(Symmetric, _torch.ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        assert op == dist.ReduceOp.SUM
        return _torch.reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@pytest.mark.parametrize("sum_only", [False, True])
@ranks(2)
def test_symmetric_memory_carries_gathers_and_those_reductions_that_only_sum(sum_only: bool) -> None:
    model, gather, reduce = nn.Linear(4, 4), SymmetricGather(), SymmetricReduce()
    model = wrapped(model)
    model.set_force_sum_reduction_for_comms(sum_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "symmetric_memory_comms", lambda *_: (gather, reduce))
        model.set_symm_mem_for_comm()
    model(torch.ones(2, 4)).sum().backward()
    assert (gather.calls, reduce.calls) == (1, int(sum_only))
    assert torch.equal(full(model.weight.grad), torch.full((4, 4), 2.0))
