"""A whole state dict that only rank 0 has becomes shards everywhere, a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from .contents import aliases_of
from .errors import CheckpointError, on_rank_0

__all__ = ["load_full_state"]

MAX_NAMED = 10


def load_full_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load rank 0's `state`, as torch.load gave it; the other ranks' is not looked at. Every rank calls it.

    torch's set_model_state_dict(broadcast_from_rank0=True) does the sending; what it lacks is that names which are
    missing or too many, and other shapes, are every rank's error, before anything changes. Of tied names one is enough.
    What is on the meta device gets its memory group by group.
    """
    aliases = aliases_of(model)
    wanted = model.state_dict()
    on_rank_0(lambda: _check(_complete(state, aliases), wanted))
    _materialise(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    is_source = not dist.is_initialized() or dist.get_rank() == 0
    set_model_state_dict(model, _complete(state, aliases) if is_source else {}, options=options)


def _materialise(model: nn.Module) -> None:
    """Memory for the parameters and buffers on the meta device that a state dict fills."""
    filled = {id(tensor) for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, torch.Tensor)}
    if not any(param.is_meta for param in model.parameters()):
        return
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    device = meshes[0].device_type if meshes else "cpu"

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta and id(tensor) in filled else tensor

    model._apply(allocate)  # type: ignore[no-untyped-call]


def _complete(state: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """With every tied name."""
    found = dict(state)
    for alias, first in aliases.items():
        if first in found:
            found.setdefault(alias, found[first])
        elif alias in found:
            found[first] = found[alias]
    return found


def _check(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    lines = [f"{key}: in the state dict, not in the model" for key in state if key not in wanted]
    for key, value in wanted.items():
        if key not in state:
            lines.append(f"{key}: in the model, not in the state dict")
        elif isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(state[key].shape):
            lines.append(f"{key}: expected shape {tuple(value.shape)}, the state dict has {tuple(state[key].shape)}")
    if lines:
        more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
        raise CheckpointError("\n".join(["rank 0's state dict does not fit:", *lines[:MAX_NAMED], *more]))
