"""Shampoo's pure update against closed forms and against a naive float64 version."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from vescale_fsdp.optim.preconditioner import BlockState, ShampooOptions, inverse_root, precondition


def power(symmetric: Tensor, exponent: float) -> Tensor:
    """By singular values: another decomposition than the one under test."""
    u, s, vh = torch.linalg.svd(symmetric)
    return u @ s.pow(exponent).diag() @ vh


def spread(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_first_step_of_a_square_gradient_is_its_polar_factor() -> None:
    grad = spread(5, 5)
    options = ShampooOptions(beta2=1.0, grafting=None, epsilon=1e-300)
    update, _ = precondition(grad, BlockState.zeros(5, 5, dtype=torch.float64), 1, options)
    u, _, vh = torch.linalg.svd(grad)  # (GG')^(-1/4) G (G'G)^(-1/4) = U V'
    torch.testing.assert_close(update, u @ vh)


def naive_lengths(grads: list[Tensor], grafting: str | None, beta2: float) -> Tensor:
    grad = grads[-1]
    decay = 1.0 if grafting == "adagrad" else beta2
    square = sum(g * g * decay ** (len(grads) - 1 - i) for i, g in enumerate(grads)) * (1 - decay if decay < 1 else 1)
    if grafting == "adam":
        square = square / (1 - beta2 ** len(grads))
    return grad if grafting in (None, "sgd") else grad / (square.sqrt() + 1e-8)  # type: ignore[union-attr]


@pytest.mark.parametrize("grafting", [None, "sgd", "adagrad", "rmsprop", "adam"])
def test_five_steps_equal_a_naive_version(grafting: Any) -> None:
    grads = [spread(4, 6, seed) for seed in range(5)]
    options = ShampooOptions(beta2=0.9, grafting=grafting, epsilon=1e-6)
    state = BlockState.zeros(4, 6, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        update, state = precondition(grad, state, step, options)
    weights = [0.1 * 0.9 ** (4 - i) / (1 - 0.9**5) for i in range(5)]
    left = sum(w * g @ g.T for w, g in zip(weights, grads, strict=True)) + 1e-6 * torch.eye(4)
    right = sum(w * g.T @ g for w, g in zip(weights, grads, strict=True)) + 1e-6 * torch.eye(6)
    expected = power(left, -0.25) @ grads[-1] @ power(right, -0.25)
    if grafting is not None:
        expected *= naive_lengths(grads, grafting, 0.9).norm() / expected.norm()
    torch.testing.assert_close(update, expected)


def test_roots_are_kept_between_the_steps_that_compute_them() -> None:
    options = ShampooOptions(precondition_frequency=3, start_preconditioning_step=2)
    assert [step for step in range(1, 10) if options.is_due(step)] == [2, 5, 8]
    state, roots = BlockState.zeros(3, 3), []
    for step in range(1, 6):
        _, state = precondition(torch.randn(3, 3), state, step, options)
        roots.append(state.left_root.clone())
    assert not roots[0].any()
    assert torch.equal(roots[1], roots[3])
    assert not torch.equal(roots[3], roots[4])


def test_before_preconditioning_starts_the_grafted_method_steps() -> None:
    grad = torch.tensor([[2.0, -3.0]])
    update, _ = precondition(grad, BlockState.zeros(1, 2), 1, ShampooOptions(start_preconditioning_step=2))
    torch.testing.assert_close(update, torch.tensor([[1.0, -1.0]]))


def test_no_argument_changes() -> None:
    state, grad = BlockState.zeros(2, 3), torch.ones(2, 3)
    precondition(grad, state, 1, ShampooOptions())
    assert torch.equal(grad, torch.ones(2, 3))
    assert not any(part.any() for part in state)


def test_a_gradient_that_is_not_finite_leaves_the_state_and_shows_in_the_update() -> None:
    state = BlockState.zeros(2, 2)
    update, after = precondition(torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), state, 1, ShampooOptions())
    assert update.isnan().any()
    assert after is state


def test_zero_gradients_give_zero_updates() -> None:
    update, state = precondition(torch.zeros(3, 2), BlockState.zeros(3, 2), 1, ShampooOptions())
    assert not update.any()
    assert state.left_root.isfinite().all()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_singular_factor_has_a_finite_root(rank: int) -> None:
    factor = spread(3, rank) @ spread(3, rank).T
    root = inverse_root(factor.float(), epsilon=1e-6, fallback_KK=torch.zeros(3, 3))
    assert root.isfinite().all()
    torch.testing.assert_close(root, root.T)


def test_a_decomposition_that_fails_is_tried_in_float64_and_then_gives_way_to_the_last_root() -> None:
    factor, fallback = torch.eye(2) * 16, torch.full((2, 2), 7.0)
    eigh, seen = torch.linalg.eigh, []

    def fails_in_float32(matrix: Tensor) -> Any:
        seen.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]
        return eigh(matrix)

    with patch.object(torch.linalg, "eigh", fails_in_float32):
        torch.testing.assert_close(inverse_root(factor, epsilon=1e-12, fallback_KK=fallback), torch.eye(2) / 2)
    assert seen == [torch.float32, torch.float64]
    with patch.object(torch.linalg, "eigh", side_effect=RuntimeError):
        assert torch.equal(inverse_root(factor, epsilon=1e-12, fallback_KK=fallback), fallback)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("beta2: expected 0 < beta2 <= 1, got 0", {"beta2": 0}),
        ("epsilon: expected epsilon > 0", {"epsilon": 0.0}),
        ("precondition_frequency: expected at least 1", {"precondition_frequency": 0}),
        ("grafting: expected one of .* got 'lion'", {"grafting": "lion"}),
    ],
)
def test_wrong_options_are_refused_by_name(message: str, options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ShampooOptions(**options)
