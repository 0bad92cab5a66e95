"""SOAP (arXiv 2409.11321): Adam on gradients that are rotated into the eigenbases of Shampoo's two factors.

Shapes: a block of the gradient is (M, N); its factors and bases are (M, M) and (N, N).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vescale_fsdp.optim import BlockViews, Borrowed, Kind, PanelOptimizer, Run

from .basis import first_basis, turn

__all__ = ["SOAP"]


class SOAP(PanelOptimizer):
    """Adam in Shampoo's eigenbasis, block by block; each block is updated by the rank that owns it.

    betas, eps, weight_decay: Adam's, decoupled. shampoo_beta: decay of the factors; betas[1] unless given.
    precondition_frequency: the bases turn every so many steps. `options`: see `vescale_fsdp.optim.MatrixOptimizer`.
    """

    algorithm = "soap"

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 1024,
        **options: Any,
    ) -> None:
        for name, beta in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("shampoo_beta", shampoo_beta or 0.0)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {beta}.")
        if precondition_frequency < 1:
            raise ValueError(f"precondition_frequency: expected at least 1, got {precondition_frequency}.")
        self.betas, self.eps, self.precondition_frequency = betas, eps, precondition_frequency
        self.shampoo_beta = betas[1] if shampoo_beta is None else shampoo_beta
        self.kinds = {"factors": Kind.SIDES, "bases": Kind.SIDES, "mean": Kind.BLOCK, "square": Kind.BLOCK}
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults, max_block_dim=max_preconditioner_dim, **options)

    def update(self, grad_MN: Tensor, views: BlockViews, step: int) -> Tensor:
        (left, right), bases = views["factors"], views["bases"]
        (mean_MN,), (square_MN,) = views["mean"], views["square"]
        grad_MN = grad_MN.to(left.dtype)
        update_MN = self._adam(grad_MN, bases, mean_MN, square_MN, step - 1) if step > 1 else grad_MN
        left.lerp_(grad_MN @ grad_MN.mT, 1 - self.shampoo_beta)
        right.lerp_(grad_MN.mT @ grad_MN, 1 - self.shampoo_beta)
        for dim, (factor, basis) in enumerate(zip((left, right), bases, strict=True)):
            if step == 1:
                basis.copy_(first_basis(factor))
            elif (step - 1) % self.precondition_frequency == 0:
                turned, sorted_MN = turn(factor, basis, square_MN, dim)
                basis.copy_(turned)
                square_MN.copy_(sorted_MN)
        return update_MN

    def apply(self, borrowed: Borrowed, group: Any, runs: Sequence[Run], updates: Sequence[Tensor]) -> None:
        moving = [i for i, run in enumerate(runs) if self.step_number(borrowed, run.matrix.tensor) > 1]
        super().apply(borrowed, group, [runs[i] for i in moving], [updates[i] for i in moving])

    def _adam(
        self, grad_MN: Tensor, bases: tuple[Tensor, ...], mean_MN: Tensor, square_MN: Tensor, step: int
    ) -> Tensor:
        left, right = bases
        beta1, beta2 = self.betas
        mean_MN.lerp_(grad_MN, 1 - beta1)
        rotated_MN = left.mT @ grad_MN @ right
        square_MN.lerp_(rotated_MN * rotated_MN, 1 - beta2)
        unbias = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        direction_MN = (left.mT @ mean_MN @ right) / (square_MN.sqrt() + self.eps) * unbias
        update_MN: Tensor = left @ direction_MN @ right.mT
        return update_MN
