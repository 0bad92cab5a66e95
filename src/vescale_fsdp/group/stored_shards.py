"""Frozen shards that are stored in their block format: codes and scales of this rank's pieces, and nothing wider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..errors import VescaleError
from ..formats.block_format import BlockFormat
from ..formats.encoded import EncodedTensor
from ..formats.plane_memory import PlaneMemory, planes_of
from ..layout import Layout
from ..managed import ManagedParam, mark_managed
from ..mesh import DataMesh
from .buffer import DBuffer
from .shards import Shards

__all__ = ["StoredShards"]


class StoredShards(Shards):
    """Each local tensor is an `EncodedTensor` that views one memory of this rank, from which gathers send.

    Values are encoded when they come: at wrapping, and when a state dict is loaded. The buffer only says where pieces
    lie.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: Layout,
        mesh: DataMesh,
        format: BlockFormat,
        *,
        offload_pin: bool | None = None,
    ) -> None:
        self.format = format
        super().__init__(managed, layout, mesh, offload_pin=offload_pin)

    def _make_buffer(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        self._planes = planes_of(self.format, self.layout, self.shapes)
        self.memory = self._new_memory(device)
        return super()._make_buffer(dtype, torch.device("meta"))

    def _new_memory(self, device: torch.device) -> PlaneMemory:
        made = PlaneMemory(self._planes, self.format.scale_dtype, device, num_shares=1)
        made.memory.zero_()
        if self.offload_pin and device.type == "cpu" and torch.accelerator.is_available():
            pinned = made.memory.pin_memory()
            return PlaneMemory(self._planes, self.format.scale_dtype, device, num_shares=1, memory=pinned)
        return made

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def held(self) -> torch.Tensor:
        return self.memory.memory

    def encoded(self, index: int, dtype: torch.dtype) -> EncodedTensor:
        """This rank's piece of tensor `index`, a view of the memory."""
        return EncodedTensor(
            self.memory.payload_of(index, self.mesh.rank, share=0),
            self.memory.scales_of(index, self.mesh.rank, share=0),
            self.format,
            shape=self._local_shapes[index],
            tiled_shape=self.shapes[index],
            dtype=dtype,
        )

    def _local_of(self, index: int, managed: ManagedParam) -> torch.Tensor:
        local = self.encoded(index, managed.param.dtype)
        span = self.layout.shard_range(index, self.numels[index], self.mesh.rank)
        if not managed.param.is_meta:
            param = managed.param.detach()
            whole = _torch.finished(_torch.local_of(param)) if isinstance(param, DTensor) else param
            local.store(whole.reshape(-1)[span.begin : span.end].view(local.shape))
        return local

    def _reallocate(self, news: Sequence[torch.Tensor]) -> None:
        """Memory of the new values' device; what it holds so far is what `news` do not view."""
        kinds = {(new.dtype, new.device) for new in news}
        if len(kinds) > 1 or not next(iter(kinds))[0].is_floating_point:
            lines = [f"{each.fqn}: {new.dtype} on {new.device}" for each, new in zip(self.managed, news, strict=True)]
            raise VescaleError(
                f"parameters that are stored in {self.format.name} must keep one floating-point dtype and one device; "
                "convert all of:\n" + "\n".join(lines)
            )
        ((dtype, device),) = kinds
        self.memory = self._new_memory(device)
        self.buffer = super()._make_buffer(dtype, torch.device("meta"))
        self.device = device

    @torch.no_grad()
    def adopt(self, *, partly_loaded: bool = False) -> bool:
        """Take what `_apply`, `to_empty` or `assign=True` put in the modules: codes as they are, values encoded."""
        found = self._found()
        if all(
            new is old and _torch.local_of(old) is local
            for new, old, local in zip(found, self.params, self.locals, strict=True)
        ):
            return False
        news = [self._local_value(i, new) for i, new in enumerate(found)]
        if partly_loaded and len({(new.dtype, new.device) for new in news}) > 1:
            return False
        self._reallocate(news)
        for i, new in enumerate(news):
            local = self.encoded(i, new.dtype)
            local.store(new)
            self._point(i, local)
        return True

    @torch.no_grad()
    def take_over(self, params: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
        """Let `params`, the same objects as before, be the sharded parameters, with these values encoded."""
        self._reallocate(values)
        for i, (param, value) in enumerate(zip(params, values, strict=True)):
            local = self.encoded(i, value.dtype)
            local.store(value.view(local.shape))
            _torch.set_placed(param, local, _torch.with_dtype(_torch.spec_of(self.params[i]), value.dtype))
            mark_managed(param, self.managed[i].fqn, sharded=True)
            self.locals[i] = local
        self.params = list(params)
        self.managed = tuple(replace(each, param=param) for each, param in zip(self.managed, params, strict=True))
