"""What a checkpoint holds of a model and its optimizer, by the names of the unsharded model; and whether it fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from .errors import CheckpointError

__all__ = ["aliases_of", "check_fit", "drop_unsaved_slots", "fresh_slots", "state_of", "with_aliases"]

MAX_NAMED = 10


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Live tensors under "model" and "optimizer"; of tied ones, the first name alone."""
    aliases = aliases_of(model)
    values = get_model_state_dict(model)
    state: dict[str, Any] = {"model": {fqn: value for fqn, value in values.items() if fqn not in aliases}}
    if optimizer is not None:
        _check_owner(model, optimizer)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _check_owner(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = set(model.parameters())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if strange := sum(param not in known for param in params):
        raise CheckpointError(
            f"optimizer: {strange} of its {len(params)} parameters are none of the model's. "
            f"Give the optimizer that was made with this model's parameters."
        )


def aliases_of(model: nn.Module) -> dict[str, str]:
    """The second and later names of tied parameters, and their first name."""
    first: dict[nn.Parameter, str] = {}
    aliases = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(param, fqn) != fqn:
            aliases[fqn] = first[param]
    return aliases


def with_aliases(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under every name that a parameter has."""
    first = {id(param): fqn for fqn, param in model.named_parameters()}
    params = model.named_parameters(remove_duplicate=False)
    return {**values, **{fqn: values[first[id(param)]] for fqn, param in params if fqn not in values}}


@contextmanager
def fresh_slots(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Inside, every trainable parameter can get its slots: torch makes none where there are gradients or other slots.

    An error inside leaves the optimizer as it was.
    """
    if optimizer is None:
        yield
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    kept = optimizer.state
    if not all(kept.get(param) for param in params if param.requires_grad):
        optimizer.state = defaultdict(dict)
    for param in params:
        param.grad = None
    try:
        yield
    except BaseException:
        optimizer.state = kept
        raise
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def drop_unsaved_slots(state: dict[str, Any], metadata: Metadata) -> None:
    """Forget slots of parameters that had none when the checkpoint was written: they never had a gradient."""
    saved = metadata.state_dict_metadata
    slots = state.get("optimizer", {}).get("state", {})
    for fqn in [fqn for fqn in slots if not any(key.startswith(f"optimizer.state.{fqn}.") for key in saved)]:
        del slots[fqn]


def check_fit(state: dict[str, Any], metadata: Metadata, aliases: Mapping[str, str]) -> None:
    """Raise, with the names, if the checkpoint lacks something of `state`, has more, or other shapes."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    wanted: dict[str, Any] = planner.state_dict
    found = {
        key: value for key, value in metadata.state_dict_metadata.items() if key.split(".")[0] in ("model", "optimizer")
    }
    if "optimizer" not in state:
        found = {key: value for key, value in found.items() if key.startswith("model.")}
    _check_groups(wanted, found)
    lines = [_missing(key, aliases) for key in wanted if key not in found]
    lines += [f"{key}: in the checkpoint, not in the model or optimizer" for key in found if key not in wanted]
    for key, value in wanted.items():
        if key in found and (problem := _mismatch(value, found[key])):
            lines.append(f"{key}: {problem}")
    if lines:
        more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
        raise CheckpointError("\n".join(["the checkpoint does not fit:", *lines[:MAX_NAMED], *more]))


def _check_groups(wanted: Iterable[str], found: Iterable[str]) -> None:
    """Names of single options would hide that there are more parameter groups, or fewer."""
    start = "optimizer.param_groups."
    mine, saved = (len({key.split(".")[2] for key in keys if key.startswith(start)}) for keys in (wanted, found))
    if mine != saved:
        raise CheckpointError(
            f"the checkpoint does not fit: its optimizer has {saved} parameter group{'s' * (saved != 1)}, not {mine}. "
            f"Make the optimizer with as many groups as were saved, of the same parameters."
        )


def _missing(key: str, aliases: Mapping[str, str]) -> str:
    tied = aliases.get(key.removeprefix("model."))
    if tied is not None:
        return f"{key}: was tied to {tied} when the checkpoint was written. Tie them before loading, untie after it"
    return f"{key}: in the model or optimizer, not in the checkpoint"


def _mismatch(value: Any, saved: Any) -> str | None:
    if isinstance(value, torch.Tensor) != isinstance(saved, TensorStorageMetadata):
        return f"expected a {type(value).__name__}, the checkpoint has something else"
    if not isinstance(value, torch.Tensor):
        return None
    if tuple(value.shape) != tuple(saved.size):
        return f"expected shape {tuple(value.shape)}, the checkpoint has {tuple(saved.size)}"
    if value.dtype.is_floating_point != saved.properties.dtype.is_floating_point:
        return f"expected {value.dtype}, the checkpoint has {saved.properties.dtype}"
    return None
