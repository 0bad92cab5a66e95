"""SOAP in one process against a naive version, and its constraint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from vescale_soap import SOAP, SoapPanels


def grads(num_steps: int, rows: int = 4, columns: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(num_steps)]


def naive_soap(weight: Tensor, steps: Sequence[Tensor]) -> Tensor:
    """One block; the eigenbasis by eigh once, then by QR in every step, as the authors' code does it."""
    left, right = (0.05 * s for s in (steps[0] @ steps[0].T, steps[0].T @ steps[0]))
    bases = [torch.linalg.eigh(factor)[1].flip(1) for factor in (left, right)]
    mean = square = torch.zeros_like(weight)
    for t, grad in enumerate(steps[1:], 1):
        rotated = bases[0].T @ grad @ bases[1]
        mean, square = 0.95 * mean + 0.05 * grad, 0.95 * square + 0.05 * rotated**2
        step = (bases[0].T @ mean @ bases[1]) / (square.sqrt() + 1e-8) * (1 - 0.95**t) ** 0.5 / (1 - 0.95**t)
        weight = weight * (1 - 0.1 * 0.01) - 0.1 * bases[0] @ step @ bases[1].T
        left, right = 0.95 * left + 0.05 * grad @ grad.T, 0.95 * right + 0.05 * grad.T @ grad
        for dim, factor in enumerate((left, right)):
            order = (bases[dim].T @ factor @ bases[dim]).diagonal().argsort(descending=True)
            bases[dim] = torch.linalg.qr(factor @ bases[dim][:, order]).Q
            square = square.index_select(dim, order)
    return weight


@pytest.mark.parametrize("batch", [(), (3,)])
def test_steps_equal_a_naive_soap(batch: tuple[int, ...]) -> None:
    param = nn.Parameter(torch.ones(*batch, 4, 4, dtype=torch.float64))
    optimizer = SOAP([param], lr=0.1, precondition_frequency=1)
    for grad in grads(6):
        param.grad = grad.expand(param.shape).clone()
        optimizer.step()
    expected = naive_soap(torch.ones(4, 4, dtype=torch.float64), grads(6))
    torch.testing.assert_close(param.detach(), expected.expand(param.shape))


def test_the_first_step_moves_no_weight() -> None:
    param = nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2)
    SOAP([param], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(param, torch.ones(3, 2))


def test_the_constraint_counts_elements_of_whole_panels() -> None:
    soap = SoapPanels()
    assert soap.numel((10, 3), (4,)) == 12
    assert soap.numel((2, 8, 3), (4,)) == 12
    assert soap.numel((2, 9, 3), (4,)) == 27
    assert soap.numel((7,), (4,)) == 1
    assert soap.numel((4096, 2), ()) == 2048


def test_wrong_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="precondition_frequency: expected at least 1, got 0"):
        SOAP([nn.Parameter(torch.zeros(2, 2))], precondition_frequency=0)
    with pytest.raises(ValueError, match=r"betas\[1\]: expected 0 <= .* got 1"):
        SOAP([nn.Parameter(torch.zeros(2, 2))], betas=(0.9, 1.0))
