"""The eigenbasis of a factor: decomposed once, then turned along by one step of orthogonal iteration.

Shapes: a factor and its basis are (K, K); `square_MN` is (M, N), in the bases of both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["first_basis", "turn"]


def first_basis(factor_KK: Tensor) -> Tensor:
    """Eigenvectors as columns, the largest eigenvalue first."""
    epsilon = 1e-30 * torch.eye(len(factor_KK), dtype=factor_KK.dtype, device=factor_KK.device)
    vectors_KK: Tensor = torch.linalg.eigh(factor_KK + epsilon).eigenvectors
    return vectors_KK.flip(1)


def turn(factor_KK: Tensor, basis_KK: Tensor, square_MN: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The basis one QR step on, sorted by eigenvalue, and the second moment sorted along `dim` with it."""
    order_K = (basis_KK.mT @ factor_KK @ basis_KK).diagonal().argsort(descending=True)
    turned_KK: Tensor = torch.linalg.qr(factor_KK @ basis_KK[:, order_K]).Q
    return turned_KK, square_MN.index_select(dim, order_K)
