"""Where torch meets ragged tensors: what is not ours stays torch's, what nobody rules raises."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import numbered
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, rand, randn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ragged_dtensor import (
    RaggedShard,
    RaggedShardError,
    UnsupportedTorchError,
    _torch,
    distribute_tensor,
)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@pytest.mark.subprocess
def test_importing_changes_nothing_and_the_first_placement_installs_the_seams() -> None:
    program = """
        import torch
        from torch.distributed.tensor import DTensor, distribute_tensor, _api, _dispatch, _redistribute, _utils

        def state():
            dispatcher = DTensor._op_dispatcher
            owners = (_api, _dispatch, _redistribute, _utils, DTensor, _api._ToTorchTensor)
            names = [dict(vars(owner)) for owner in owners]
            handlers = dict(dispatcher._custom_op_handlers)
            allowed = list(torch.serialization.get_safe_globals())
            return names, distribute_tensor.__code__, dict(vars(dispatcher)), handlers, allowed

        before = state()
        import ragged_dtensor
        assert state() == before, "importing changed torch"
        ragged_dtensor.RaggedShard((0,), (1, 2))
        after = state()
        assert all(old != new for old, new in zip(before[1:], after[1:])), "nothing was installed"
        ragged_dtensor.RaggedShard((0,), (1, 3))
        assert state() == after, "a second placement installed again"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_another_torch_is_refused_with_the_supported_range() -> None:
    """A54: torch 2.11 to 2.14, of which `make test-torch TORCH=...` tests each."""
    for version in ("2.10.1+cpu", "2.15.0", "3.0.0a0"):
        with pytest.raises(UnsupportedTorchError, match=rf"torch >=2\.11,<2\.15; this is torch {version[:3]}"):
            _torch.check_torch(version)
    for version in ("2.11.0", "2.14.1+cu130"):
        _torch.check_torch(version)


def test_a_torch_without_a_name_that_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_torch.NEEDED, "DTensor", (DTensor, ("__create_chunk_list__", "no_such_name")))
    with pytest.raises(UnsupportedTorchError, match=r"and lacks DTensor\.no_such_name"):
        _torch.check_torch()


@ranks(2)
def test_no_caller_is_told_that_a_ragged_shard_is_one_box() -> None:
    mesh = line()
    with pytest.raises(RaggedShardError, match="not one box of the full tensor"):
        compute_local_shape_and_global_offset((4, 3), mesh, [RaggedShard((0, 1), (5, 7))])
    shape, offset = compute_local_shape_and_global_offset((5, 3), mesh, [Shard(0)])
    assert (shape, offset) == (((3, 3), (0, 0)) if dist.get_rank() == 0 else ((2, 3), (3, 0)))


@ranks(2)
def test_random_factories_give_the_values_of_the_unsharded_call() -> None:
    for factory, full in ((rand, torch.rand), (randn, torch.randn)):
        torch.manual_seed(3)
        wanted = full(6, 3)
        torch.manual_seed(3)
        x = factory(6, 3, device_mesh=line(), placements=[RaggedShard((0, 1), (1, 8))], requires_grad=True)
        assert torch.equal(x.full_tensor(), wanted)
        assert x.requires_grad


@ranks(2)
def test_local_gradients_can_be_differentiated_again() -> None:
    x = distribute_tensor(numbered((6,)) + 1, line(), [RaggedShard((0,), (1, 2))]).requires_grad_()
    (grad,) = torch.autograd.grad((x.to_local() ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.to_local().sum(), x)
    assert torch.equal(second.full_tensor(), 6 * (numbered((6,)) + 1))


@ranks(2)
def test_a_gradient_placement_given_by_hand_is_taken() -> None:
    x = distribute_tensor(numbered((6,)), line(), [RaggedShard((0,), (1, 2))]).requires_grad_()
    local = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    (local * (dist.get_rank() + 1)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), torch.full((6,), 3.0))


@ranks(2)
def test_specs_print_hash_and_compare() -> None:
    x = distribute_tensor(numbered((6, 2)), line(), [RaggedShard((0,), (1, 2))])
    y = distribute_tensor(numbered((6, 2)), line(), [RaggedShard((0,), (2, 4))])
    assert x._spec == y._spec
    assert hash(x._spec) == hash(y._spec)
    assert "RaggedShard(dims=(0,), local_units=(1, 2))" in repr(x)
    assert str(x._spec)
    if hasattr(x._spec, "_stable_hash"):  # since torch 2.12
        assert x._spec._stable_hash() == y._spec._stable_hash()


@ranks(2)
def test_ragged_tensors_survive_pickle_and_deepcopy() -> None:
    import copy
    import io

    x = torch.nn.Parameter(distribute_tensor(numbered((6, 2)), line(), [RaggedShard((0,), (1, 2))]))
    for y in (copy.deepcopy(x), _saved_and_loaded(x, io.BytesIO())):
        assert y.placements == x.placements
        assert torch.equal(y.to_local(), x.to_local())


def _saved_and_loaded(x: torch.Tensor, buffer: object) -> DTensor:
    torch.save(x, buffer)  # type: ignore[arg-type]
    buffer.seek(0)  # type: ignore[attr-defined]
    return torch.load(buffer, weights_only=True)  # type: ignore[arg-type, no-any-return]


@ranks(2)
def test_stock_tensors_take_torch_s_own_way() -> None:
    RaggedShard((0,), (1, 2))
    x = DTensor.from_local(torch.ones(2, 3), line(), [Shard(0)])
    assert torch.equal((x + 1).sum().full_tensor(), torch.tensor(24.0))
    assert x.to(torch.int32).max().full_tensor() == 1
    assert torch.equal(x.redistribute(placements=[Shard(1)]).full_tensor(), torch.ones(4, 3))


@ranks(2)
def test_ranks_outside_the_mesh_hold_nothing() -> None:
    mesh = DeviceMesh("cpu", [0])
    x = distribute_tensor(numbered((4,)), mesh, [RaggedShard((0,), (1,))])
    y = x.redistribute(placements=[Replicate()])
    assert y.to_local().numel() == (4 if dist.get_rank() == 0 else 0)


@pytest.mark.subprocess
def test_one_process_that_plays_all_ranks_is_refused() -> None:
    program = """
        import torch, torch.distributed as dist
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from ragged_dtensor import RaggedShard, RaggedShardError, distribute_tensor

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        with LocalTensorMode(2):
            mesh = init_device_mesh("cpu", (2,))
            for make in (distribute_tensor, lambda x, mesh, placements: torch.distributed.tensor.zeros(
                    8, device_mesh=mesh, placements=placements)):
                try:
                    make(torch.arange(8.0), mesh, [RaggedShard((0,), (1, 3))])
                except RaggedShardError as error:
                    assert "instead of LocalTensorMode" in str(error), error
                else:
                    raise AssertionError("nothing was raised")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
