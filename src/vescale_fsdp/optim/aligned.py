"""Gradients and state cut as their parameter is, or an error that names the parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_fsdp.errors import VescaleError

__all__ = ["align_state", "aligned_grad"]


def aligned_grad(param: Tensor, name: str) -> Tensor:
    """The parameter's gradient; a replicated one is cut, without a message.

    Raises VescaleError if it is cut in another way: moving it would take messages from ranks that may have no gradient.
    """
    grad = param.grad
    assert grad is not None
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor) or grad.placements == param.placements:
        return grad
    for own, wanted in zip(grad.placements, param.placements, strict=True):
        if own != wanted and not own.is_replicate():
            raise VescaleError(
                f"{name}: expected a gradient with the parameter's placements {param.placements}, "
                f"got {grad.placements}. Redistribute the gradient before the step."
            )
    return grad.redistribute(placements=param.placements)


def align_state(state: dict[str, Any], param: Tensor, name: str) -> None:
    """Cut state of the parameter's shape as the parameter is now, if it is not. Collective.

    Raises VescaleError for state on another mesh than the parameter's, or on none.
    """
    for key, value in state.items():
        if not isinstance(param, DTensor) or not torch.is_tensor(value) or value.shape != param.shape or key == "step":
            continue  # a count has the shape of a scalar parameter
        if not isinstance(value, DTensor) or value.device_mesh != param.device_mesh:
            raise VescaleError(
                f"{name}: its state {key} is not on its mesh {param.device_mesh}. Load a state dict through "
                "torch.distributed.checkpoint, which fits it to the parameters."
            )
        if value.placements != param.placements:
            state[key] = value.redistribute(placements=param.placements)
