"""The optimizers that the demo knows, at one learning rate: AdamW for all, or Muon or Shampoo for the matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vescale_fsdp.demo.settings import OptimizerName, Settings
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo, matrix_groups

__all__ = ["make_optimizer"]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of the settings; embedding, head and norms are AdamW's in any case.

    The lengths of Muon's and Shampoo's updates match AdamW's, so that all take the same learning rate.
    """
    if settings.optimizer is OptimizerName.ADAMW:
        return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=BETAS, fused=True)
    if settings.optimizer is OptimizerName.ADAMW8BIT:
        return AdamW8bit(model.named_parameters(), lr=settings.lr, betas=BETAS)
    groups = matrix_groups(model, adamw=_is_head, lr=settings.lr, betas=BETAS)
    thirds = (settings.dim,) * 3
    options: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": WEIGHT_DECAY,
        "split": {fqn: thirds for group in groups for fqn, _ in group["params"] if fqn.endswith("qkv.weight")},
    }
    if settings.optimizer is OptimizerName.MUON:
        return Muon(groups, adjust_lr_fn="match_rms_adamw", **options)
    return Shampoo(
        groups, beta1=BETAS[0], beta2=BETAS[1], epsilon=1e-8, precondition_frequency=10, grafting="adam", **options
    )


def _is_head(fqn: str, param: Tensor) -> bool:
    return fqn == "head.weight"
