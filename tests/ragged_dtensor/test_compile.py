"""Ragged tensors under torch.compile: graphs are guarded by the placement's value, movements are traced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import numbered
from ranks import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_dtensor import RaggedShard, distribute_tensor

EVEN = RaggedShard((0,), (1, 1))


def ragged(units: tuple[int, int]) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(numbered((8, 4)), mesh, [RaggedShard((0,), units)])


@ranks(2)
def test_a_graph_is_reused_for_equal_cuts_and_compiled_anew_for_others() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda x, y: (x * 2 + y).exp(), backend=counter, fullgraph=True)
    for units, count in (((1, 3), 1), ((1, 3), 1), ((2, 6), 1), ((3, 1), 2)):
        result = f(ragged(units), ragged(units))
        assert counter.frame_count == count
        assert torch.equal(result.full_tensor(), (numbered((8, 4)) * 3).exp())


@ranks(2)
def test_movements_compile_forward_and_backward() -> None:
    """C08, pytorch#141835: a move to another dim differed in stride between eager and compiled."""
    if torch.__version__.startswith("2.11."):
        pytest.skip("dynamo of torch 2.11 takes no placement from a global variable")

    def whole(x: DTensor) -> torch.Tensor:
        return x.full_tensor() * 2

    def even(x: DTensor) -> DTensor:
        return x.redistribute(placements=[EVEN]) * 2

    def columns(x: DTensor) -> DTensor:
        return x.redistribute(placements=[Shard(1)]) * 2

    def local(x: DTensor) -> torch.Tensor:
        return x.to_local() * 2

    x = ragged((1, 3)).requires_grad_()
    for function in (whole, even, columns, local):
        eager, compiled = function(x), torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(_local(eager), _local(compiled))
        assert _local(eager).stride() == _local(compiled).stride()
        grads = [torch.autograd.grad(_local(y).sum(), x)[0] for y in (eager, compiled)]
        assert grads[0].placements == grads[1].placements
        assert torch.equal(grads[0].to_local(), grads[1].to_local())
        assert all(grad.to_local().is_contiguous() for grad in grads)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@ranks(2)
def test_replicas_are_cut_in_a_graph() -> None:
    if torch.__version__.startswith("2.11."):
        pytest.skip("dynamo of torch 2.11 takes no placement from a global variable")
    f = torch.compile(lambda x: x.redistribute(placements=[EVEN]), backend="aot_eager", fullgraph=True)
    x = ragged((1, 3)).redistribute(placements=[Replicate()])
    assert torch.equal(f(x).to_local(), numbered((8, 4)).split(4)[dist.get_rank()])
