"""The pure mathematics of Muon: momentum, Newton-Schulz over a batch of equal shapes, learning rate by shape.

Shapes: B matrices of M rows and N columns; K = min(M, N).

The iteration follows torch.optim.Muon (which follows Keller Jordan's Muon): divide by the Frobenius norm, then apply a
quintic polynomial of the Gram matrix `steps` times, so that every singular value ends near one. Nothing here knows of
ranks: `lend` brings whole matrices to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NewtonSchulz", "adjusted_lr", "muon_update", "orthogonalize", "orthogonalize_each"]

LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class NewtonSchulz:
    """How a matrix is orthogonalized; the defaults are torch.optim.Muon's, which iterates in bfloat16."""

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if len(self.coefficients) != 3:
            raise ValueError(f"ns_coefficients: expected exactly 3 values, got {self.coefficients}.")
        if not 0 <= self.steps < 100:
            raise ValueError(f"ns_steps: expected 0 <= ns_steps < 100, got {self.steps}.")
        if not self.eps >= 0:
            raise ValueError(f"eps: expected eps >= 0, got {self.eps}.")
        if not self.dtype.is_floating_point:
            raise ValueError(f"iteration_dtype: expected a floating point dtype, got {self.dtype}.")

    def flops(self, rows: int, columns: int) -> int:
        """Multiplications and additions for one matrix: two products (K, L) and one (K, K) per step."""
        short, long = sorted((rows, columns))
        return self.steps * (4 * short * short * long + 2 * short**3) + rows * columns


def muon_update(
    grad_MN: Tensor,
    momentum_MN: Tensor,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    iteration: NewtonSchulz = NewtonSchulz(),
) -> tuple[Tensor, Tensor]:
    """The direction for one whole matrix, and its new momentum. Neither argument changes."""
    momentum_MN = momentum_MN.lerp(grad_MN, 1 - momentum)
    update_MN = grad_MN.lerp(momentum_MN, momentum) if nesterov else momentum_MN
    return orthogonalize(update_MN, iteration), momentum_MN


def orthogonalize(update_BMN: Tensor, iteration: NewtonSchulz = NewtonSchulz()) -> Tensor:
    """Nearly the nearest (semi-)orthogonal matrices of a `(..., M, N)` batch, in the iteration's dtype.

    Each matrix of the batch is treated alone; a matrix of zeros stays zero, and so does one without elements.
    """
    if update_BMN.ndim < 2:
        raise ValueError(f"Expected matrices (..., M, N), got a tensor of shape {tuple(update_BMN.shape)}.")
    if update_BMN.numel() == 0:
        return update_BMN.to(iteration.dtype)
    is_tall = update_BMN.size(-2) > update_BMN.size(-1)
    x_BKL = update_BMN.to(iteration.dtype)
    x_BKL = x_BKL.mT if is_tall else x_BKL
    x_BKL = x_BKL / x_BKL.norm(dim=(-2, -1), keepdim=True).clamp(min=iteration.eps)
    a, b, c = iteration.coefficients
    multiply_add = torch.addmm if x_BKL.ndim == 2 else _baddbmm
    for _ in range(iteration.steps):
        gram_BKK = x_BKL @ x_BKL.mT
        polynomial_BKK = multiply_add(gram_BKK, gram_BKK, gram_BKK, beta=b, alpha=c)
        x_BKL = multiply_add(x_BKL, polynomial_BKK, x_BKL, beta=a)
    return x_BKL.mT if is_tall else x_BKL


def orthogonalize_each(matrices: Sequence[Tensor], iteration: NewtonSchulz = NewtonSchulz()) -> list[Tensor]:
    """Orthogonalize matrices of any shapes, those of equal shape in one batch; results in the order given."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix_MN in enumerate(matrices):
        by_shape.setdefault(matrix_MN.shape, []).append(index)
    results: list[Tensor | None] = [None] * len(matrices)
    for indices in by_shape.values():
        if len(indices) == 1:  # addmm: the kernels, hence the rounding, of torch.optim.Muon
            results[indices[0]] = orthogonalize(matrices[indices[0]], iteration)
            continue
        batch_BMN = torch.stack([matrices[index].to(iteration.dtype) for index in indices])
        for index, result_MN in zip(indices, orthogonalize(batch_BMN, iteration).unbind(), strict=True):
            results[index] = result_MN
    return [result for result in results if result is not None]


def adjusted_lr(lr: float, adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """torch.optim.Muon's two rules: `original` (Jordan) and `match_rms_adamw` (Moonshot)."""
    rows, columns = shape
    match adjust_lr_fn:
        case None | "original":
            return lr * math.sqrt(max(1.0, rows / columns))
        case "match_rms_adamw":
            return lr * 0.2 * math.sqrt(max(rows, columns))
        case _:
            raise ValueError(f"adjust_lr_fn: expected one of {LR_ADJUSTMENTS}, got {adjust_lr_fn!r}.")


def _baddbmm(input_BMN: Tensor, left_BMK: Tensor, right_BKN: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (input_BMN, left_BMK, right_BKN)]
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).view(input_BMN.shape)
