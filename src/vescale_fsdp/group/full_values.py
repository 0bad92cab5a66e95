"""Full tensors in a state dict become this rank's shards before a module loads them, so that none replaces a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_dtensor import distribute_tensor

from ..formats.encoded import EncodedTensor
from ..managed import ManagedParam

__all__ = ["shard_full_values"]


@torch.no_grad()
def shard_full_values(
    module: nn.Module, managed: Sequence[ManagedParam], state_dict: dict[str, Any], prefix: str
) -> None:
    """Replace the full tensors that `module` is about to load; each rank takes its own part of what it was given.

    No communication: every rank needs the same full tensors. What has another shape stays, and torch names its key.
    """
    for each in managed:
        param = each.param
        assert isinstance(param, DTensor)
        local = param.to_local()
        # Other subclasses say themselves what they take.
        if type(local) is not torch.Tensor and not isinstance(local, EncodedTensor):
            continue
        for owner, name in each.owners:
            full = state_dict.get(prefix + name)
            if owner is not module or not isinstance(full, torch.Tensor) or isinstance(full, DTensor):
                continue
            if full.shape == param.shape:
                state_dict[prefix + name] = distribute_tensor(
                    full.detach(), param.device_mesh, param.placements, src_data_rank=None
                )
