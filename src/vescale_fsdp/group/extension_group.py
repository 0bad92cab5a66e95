"""A communication group whose parameters are tensor subclasses that gather themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..managed import ManagedParam, mark_managed
from .buffer import DBuffer
from .extensions import ExtensionGather
from .param_group import ParamGroup
from .shards import Shards

__all__ = ["ExtensionGroup"]


class ExtensionShards(Shards):
    """Shards that are subclasses with storage of their own; the buffer only says where reduced gradients lie."""

    def _make_buffer(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        return super()._make_buffer(dtype, torch.device("meta"))

    @torch.no_grad()
    def _local_of(self, index: int, managed: ManagedParam) -> torch.Tensor:
        param = managed.param.detach()
        span = self.layout.shard_range(index, self.numels[index], self.mesh.rank)
        row = torch.Size(param.shape[1:]).numel() or 1
        rows = param.narrow(0, span.begin // row, len(span) // row)
        local = param.new_zeros(rows.shape)
        if rows.numel():
            local.copy_(rows)
        return local.to("cpu") if self.is_offloaded else local

    def adopt(self, *, partly_loaded: bool = False) -> bool:
        """Take what `_apply` or `assign=True` put in the modules: there is no buffer to bring it back to."""
        found: list[Any] = [each.module._parameters[each.owners[0][1]] for each in self.managed]
        moved = any(
            new is not old or _torch.local_of(old) is not local
            for new, old, local in zip(found, self.params, self.locals, strict=True)
        )
        if moved:
            self.params = found
            self.locals = [_torch.local_of(param) for param in found]
            self.device = self.locals[0].device
        return moved


class ExtensionGroup(ParamGroup):
    """Gathers through its parameters' own methods; reduces like any group."""

    def _make_shards(self, managed: Sequence[ManagedParam], offload_pin: bool | None) -> Shards:
        shards = ExtensionShards(managed, self.plan.layout, self.mesh, offload_pin=offload_pin)
        self._gather = ExtensionGather(shards, self.mesh, self.mp_policy)
        return shards

    @property
    def views_shard(self) -> bool:
        return False

    def _start_gathering(self, async_op: bool) -> Any:
        return self._gather.start(async_op=async_op, traffic=self.traffic)

    def _end_gathering(self) -> None:
        if self._pending is not None:
            gathering: Any
            gathering, event = self._pending
            self.streams.use(event)
            made = self._gather.make(gathering.wait(), self.compute_dtype, self._unsharded)
            self._unsharded = self._unsharded or self._as_parameters(made)
            self.streams.done_with(self._lane)  # what was gathered has been read, and its memory is the lane's again
            self._pending = None

    def _as_parameters(self, tensors: list[torch.Tensor]) -> list[nn.Parameter]:
        params = []
        with torch.inference_mode(False), torch.no_grad():
            for i, (tensor, sharded) in enumerate(zip(tensors, self.shards.params, strict=True)):
                param = nn.Parameter(tensor, requires_grad=sharded.requires_grad)
                mark_managed(param, self.fqns[i])
                params.append(param)
        return params

    def _free_whole(self) -> None:
        self.streams.done_with(self._lane)
        self._gather.free()
