"""Newton-Schulz and Muon's update against torch.optim.Muon and against singular values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_fsdp.optim.orthogonalize import (
    NewtonSchulz,
    adjusted_lr,
    muon_update,
    orthogonalize,
    orthogonalize_each,
)

SHAPES = [(6, 10), (10, 6), (1, 7), (7, 1), (1, 1), (8, 8)]


def torch_step(weight: Tensor, grads: list[Tensor], **options: object) -> Tensor:
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([param], **options)  # type: ignore[arg-type]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_matrix_takes_the_steps_of_torch_muon_bit_for_bit(shape: tuple[int, int], nesterov: bool) -> None:
    weight, *grads = [torch.randn(shape) for _ in range(4)]
    ours, momentum = weight.clone(), torch.zeros(shape)
    for grad in grads:
        update, momentum = muon_update(grad, momentum, nesterov=nesterov)
        ours.mul_(1 - 0.1 * 0.2).add_(update, alpha=-adjusted_lr(0.1, None, shape))
    assert torch.equal(ours, torch_step(weight, grads, lr=0.1, weight_decay=0.2, nesterov=nesterov))


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_learning_rates_by_shape_are_torch_muons(adjust: str, shape: tuple[int, int]) -> None:
    grad = torch.randn(shape)
    update, _ = muon_update(grad, torch.zeros(shape))
    expected = torch_step(torch.zeros(shape), [grad], lr=0.3, adjust_lr_fn=adjust)
    assert torch.equal(torch.zeros(shape).add_(update, alpha=-adjusted_lr(0.3, adjust, shape)), expected)


def test_the_update_changes_neither_gradient_nor_momentum() -> None:
    grad, momentum = torch.randn(4, 3), torch.randn(4, 3)
    before = grad.clone(), momentum.clone()
    muon_update(grad, momentum, nesterov=False)
    assert torch.equal(grad, before[0])
    assert torch.equal(momentum, before[1])


@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_enough_exact_steps_give_the_polar_factor(shape: tuple[int, int]) -> None:
    matrix = torch.randn(3, *shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    cubic = NewtonSchulz(coefficients=(1.5, -0.5, 0.0), steps=40, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrix, cubic), u @ vh)


def test_a_batch_gives_what_each_matrix_gives_alone() -> None:
    exact = NewtonSchulz(dtype=torch.float64)
    matrices = [torch.randn(shape, dtype=torch.float64) for shape in [(4, 6), (6, 4), (4, 6), (2, 2), (4, 6)]]
    for result, matrix in zip(orthogonalize_each(matrices, exact), matrices, strict=True):
        torch.testing.assert_close(result, orthogonalize(matrix, exact))


def test_zeros_stay_zero_and_nothing_stays_nothing() -> None:
    assert not orthogonalize(torch.zeros(3, 4)).any()
    assert orthogonalize(torch.zeros(0, 4)).shape == (0, 4)


def test_wrong_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="ns_steps: expected 0 <= ns_steps < 100, got 100"):
        NewtonSchulz(steps=100)
    with pytest.raises(ValueError, match="ns_coefficients: expected exactly 3 values"):
        NewtonSchulz(coefficients=(1.0, 2.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"iteration_dtype: .* got torch.int32"):
        NewtonSchulz(dtype=torch.int32)
    with pytest.raises(ValueError, match="adjust_lr_fn: expected one of"):
        adjusted_lr(1.0, "muon", (2, 2))
    with pytest.raises(ValueError, match=r"Expected matrices .* shape \(3,\)"):
        orthogonalize(torch.zeros(3))
