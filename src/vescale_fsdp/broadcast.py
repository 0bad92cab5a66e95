"""One replica's weights for all: what to call after initialising an HSDP model."""

from __future__ import annotations

import torch
from torch import nn

from .errors import VescaleError
from .group.param_group import ParamGroup
from .replicas import copy_to_replicas
from .state import find_state

__all__ = ["broadcast_replicas"]


@torch.no_grad()
def broadcast_replicas(module: nn.Module, source: int = 0) -> None:
    """Give every replica of the wrapped modules in `module` the weights of replica `source`.

    For meshes with a replicate axis (HSDP); every rank calls it. One broadcast per group, of a rank's shard: nothing is
    gathered. Buffers, and optimizer state that exists already, stay as they are.
    NotImplementedError for tensor subclasses that gather themselves, before anything changes.
    """
    states = dict.fromkeys(state for each in module.modules() if (state := find_state(each)) is not None)
    if not states:
        raise VescaleError(f"{type(module).__name__} holds no module that vescale_fsdp.fully_shard wrapped")
    groups = [group for state in states for group in state.groups]
    for group in groups:
        group.to_sharded()
        group.adopt()
        _check(group)
    for group in groups:
        copy_to_replicas(group, source)


def _check(group: ParamGroup) -> None:
    """Subclasses that gather themselves lie in no memory that could be sent."""
    shards = group.shards
    if group.mesh.num_replicas > 1 and shards.held.is_meta and not shards.is_meta:
        raise NotImplementedError(
            f"{group.fqns[0]}: gathers itself (fsdp_pre_all_gather), which broadcast_replicas cannot copy. "
            f"Give every replica the same seed."
        )
