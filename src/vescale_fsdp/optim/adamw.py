"""AdamW for what is no matrix: the partner of Muon and Shampoo inside the same optimizer object.

The update is torch's own, on local shards: every element by itself, so that no rank needs another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from .aligned import align_state, aligned_grad

__all__ = ["ADAMW_DEFAULTS", "adamw_step"]

ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def adamw_step(named: Iterable[tuple[str, Tensor]], state: dict[Tensor, dict[str, Any]], group: dict[str, Any]) -> None:
    """One step of the parameters that have a gradient; state keys, and their shapes, are torch.optim.AdamW's."""
    params = dict(named)
    for name, param in params.items():
        if state.get(param):
            align_state(state[param], param, name)
    with_grad = [param for param in params.values() if param.grad is not None]
    grads = [aligned_grad(param, name) for name, param in params.items() if param.grad is not None]
    for param in with_grad:
        if "exp_avg" not in state[param]:
            state[param]["step"] = torch.tensor(0.0, dtype=torch.float32)
            state[param]["exp_avg"] = torch.zeros_like(param)
            state[param]["exp_avg_sq"] = torch.zeros_like(param)
    states = [state[param] for param in with_grad]
    beta1, beta2 = group["betas"]
    adamw(
        [_local(param) for param in with_grad],
        [_local(grad) for grad in grads],
        [_local(each["exp_avg"]) for each in states],
        [_local(each["exp_avg_sq"]) for each in states],
        [],
        [each["step"] for each in states],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
