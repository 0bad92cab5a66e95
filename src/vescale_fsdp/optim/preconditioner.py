"""The pure mathematics of blocked Shampoo: a block's gradient and state in, its update and new state out.

Shapes: a block has M rows and N columns, its factors are (M, M) and (N, N).

    L = beta2 L + (1 - beta2) G G'      R = beta2 R + (1 - beta2) G' G
    update = L^(-1/4) G R^(-1/4), scaled to the norm of the grafted method's own update

Follows V. Gupta et al., "Shampoo" (arXiv 1802.09568), and R. Anil et al., "Scalable Second Order Optimization for Deep
Learning" (arXiv 2002.09018). Nothing here knows of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vescale_fsdp.errors import VescaleError

__all__ = ["BlockState", "Grafting", "ShampooOptions", "inverse_root", "precondition"]

Grafting = Literal["sgd", "adagrad", "rmsprop", "adam"]
# Keeps the quotient of two norms finite where the preconditioned update is zero.
TINY = 1e-30


@dataclass(frozen=True)
class ShampooOptions:
    """How blocks are preconditioned; names and meanings as in Distributed Shampoo (arXiv 2309.06497).

    beta2: decay of the factors and of the grafted method's second moment; 1 sums instead.
    epsilon: added to a factor's eigenvalues before the root.
    precondition_frequency: roots are computed anew every so many steps, and at `start_preconditioning_step`.
    start_preconditioning_step: before it, updates are the grafted method's own.
    grafting: whose update gives the length: the plain gradient (`sgd`), `adagrad`, `rmsprop`, `adam` (bias-corrected);
        None keeps Shampoo's own length. The length is taken block by block.
    """

    beta2: float = 0.999
    epsilon: float = 1e-12
    precondition_frequency: int = 1
    start_preconditioning_step: int = 1
    grafting: Grafting | None = "adam"
    grafting_epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if not 0 < self.beta2 <= 1:
            raise VescaleError(f"beta2: expected 0 < beta2 <= 1, got {self.beta2}.")
        for name in ("epsilon", "grafting_epsilon"):
            if not getattr(self, name) > 0:
                raise VescaleError(f"{name}: expected {name} > 0, got {getattr(self, name)}.")
        for name in ("precondition_frequency", "start_preconditioning_step"):
            if getattr(self, name) < 1:
                raise VescaleError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        if self.grafting is not None and self.grafting not in get_args(Grafting):
            raise VescaleError(f"grafting: expected one of {get_args(Grafting)} or None, got {self.grafting!r}.")

    @property
    def needs_square(self) -> bool:
        """Whether the grafted method has a second moment."""
        return self.grafting not in (None, "sgd")

    def is_due(self, step: int) -> bool:
        """Whether step number `step` (from 1) computes the roots."""
        start = self.start_preconditioning_step
        return step >= start and (step - start) % self.precondition_frequency == 0


class BlockState(NamedTuple):
    """What one block remembers: its factors, their inverse roots, and the grafted method's second moment (if any)."""

    left: Tensor
    right: Tensor
    left_root: Tensor
    right_root: Tensor
    square: Tensor

    @classmethod
    def zeros(cls, rows: int, columns: int, *, dtype: torch.dtype = torch.float32) -> BlockState:
        shapes = ((rows, rows), (columns, columns), (rows, rows), (columns, columns), (rows, columns))
        return cls(*(torch.zeros(shape, dtype=dtype) for shape in shapes))


def precondition(grad_MN: Tensor, state: BlockState, step: int, options: ShampooOptions) -> tuple[Tensor, BlockState]:
    """The update of one block at step number `step` (from 1), and its new state. No argument changes.

    A gradient that is not finite makes an update that is not, and leaves the state as it was.
    """
    grad_MN = grad_MN.to(state.left.dtype)
    if not bool(grad_MN.isfinite().all()):
        return grad_MN, state
    beta2 = options.beta2
    left_MM = _accumulate(state.left, grad_MN @ grad_MN.mT, beta2)
    right_NN = _accumulate(state.right, grad_MN.mT @ grad_MN, beta2)
    square_MN = state.square
    if options.needs_square:
        square_MN = _accumulate(square_MN, grad_MN * grad_MN, 1.0 if options.grafting == "adagrad" else beta2)
    left_root_MM, right_root_NN = state.left_root, state.right_root
    if options.is_due(step):
        unbiased = 1 / _bias(beta2, step)
        left_root_MM = inverse_root(left_MM * unbiased, epsilon=options.epsilon, fallback_KK=left_root_MM)
        right_root_NN = inverse_root(right_NN * unbiased, epsilon=options.epsilon, fallback_KK=right_root_NN)
    state = BlockState(left_MM, right_NN, left_root_MM, right_root_NN, square_MN)
    grafted_MN = _grafted(grad_MN, square_MN, step, options)
    if step < options.start_preconditioning_step:
        return grafted_MN, state
    update_MN = left_root_MM @ grad_MN @ right_root_NN
    if options.grafting is None:
        return update_MN, state
    return update_MN * (grafted_MN.norm() / update_MN.norm().clamp(min=TINY)), state


def inverse_root(factor_KK: Tensor, *, epsilon: float, fallback_KK: Tensor, order: int = 4) -> Tensor:
    """`factor^(-1/order)` of a symmetric factor by eigendecomposition.

    Eigenvalues are shifted to be at least `epsilon`. When the decomposition fails it is tried in float64; what is still
    not finite gives way to `fallback_KK`, the last root.
    """
    for dtype in (factor_KK.dtype, torch.float64):
        try:
            values_K, vectors_KK = torch.linalg.eigh(factor_KK.to(dtype))
        except RuntimeError:  # LinAlgError is one
            continue
        values_K = values_K - values_K.min().clamp(max=0) + epsilon
        root_KK: Tensor = (vectors_KK * values_K.pow(-1 / order)) @ vectors_KK.mT
        if bool(root_KK.isfinite().all()):
            return root_KK.to(factor_KK.dtype)
    return fallback_KK


def _grafted(grad_MN: Tensor, square_MN: Tensor, step: int, options: ShampooOptions) -> Tensor:
    match options.grafting:
        case None | "sgd":
            return grad_MN
        case "adam":
            square_MN = square_MN / _bias(options.beta2, step)
        case "adagrad" | "rmsprop":
            pass
    return grad_MN / (square_MN.sqrt() + options.grafting_epsilon)


def _accumulate(old: Tensor, new: Tensor, beta: float) -> Tensor:
    return old + new if beta == 1 else old * beta + new * (1 - beta)


def _bias(beta: float, step: int) -> float:
    """By how much a decayed mean of `step` values falls short; 1 for a sum."""
    return 1.0 if beta == 1 else -math.expm1(step * math.log(beta))
