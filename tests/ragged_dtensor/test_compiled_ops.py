"""Ops on ragged tensors under torch.compile: the values of eager mode, and no second compilation over steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ragged_dtensor import RaggedShard, distribute_tensor

CUTS = [RaggedShard((0,), (1, 2)), RaggedShard((0, 1), (5, 7)), RaggedShard((0, 1), (0, 1))]


def tensors() -> list[DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    return [distribute_tensor(torch.randn(6, 4), mesh, [cut], src_data_rank=None) for cut in CUTS]


@ranks(2, timeout_s=400)
def test_elementwise_functions_compile_once_per_cut_and_match_eager() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x * y + 2, -x).clamp(max=3).to(torch.float64)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for step in range(3):
        for x in tensors():
            x, y = x + step, x * 2
            result = compiled(x, y)
            assert result.placements == x.placements
            assert torch.equal(result.to_local(), function(x, y).to_local())
    assert counter.frame_count == len(CUTS)


@ranks(2, timeout_s=400)
def test_reductions_and_their_gradients_compile() -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum() + x.mean() + x.norm() + x.amax()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for x in tensors()[:2]:
        leaf, twin = (x.detach().clone().requires_grad_() for _ in range(2))
        result, expected = compiled(leaf), function(twin)
        result.backward()
        expected.backward()
        assert torch.allclose(result.full_tensor(), expected.full_tensor())
        assert torch.allclose(leaf.grad.full_tensor(), twin.grad.full_tensor())


def assert_steps_match(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ours, theirs = ([nn.Parameter(x) for x in tensors()] for _ in range(2))
    compiled, eager = make(ours), make(theirs)
    step, counts = torch.compile(compiled.step, backend=counter), []
    for index in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = (other * (index + 1)).sin().detach()
            other.grad = mine.grad.clone()
        step()
        eager.step()
        counts.append(counter.frame_count)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.to_local(), other.to_local())
    assert counts[1] == counts[3] <= 2, counts  # momentum appears in the first step, which is compiled anew then


@ranks(2, timeout_s=400)
def test_optimizer_steps_compile_once_and_match_eager() -> None:
    assert_steps_match(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)))
    assert_steps_match(lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9, foreach=True))
