"""A communication group in a block format whose codes outlive a gather: stored, or handed to modules, or both.

frozen          stored encoded, gathered as stored, never encoded again
trainable       full-precision shards, encoded at every gather
TakesEncoded    modules find codes and scales of the whole parameter, not decoded values
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..errors import VescaleError
from ..formats.block_format import BlockFormat
from ..formats.encoded import EncodedTensor, takes_encoded
from ..formats.plane_memory import PlaneMemory
from ..managed import ManagedParam, mark_managed
from ..mesh import DataMesh
from ..plan import GroupPlan
from .param_group import ParamGroup
from .quantized import Handed
from .shards import Shards
from .stored_shards import StoredShards
from .transfer import Gathering

__all__ = ["EncodedGroup", "is_handed"]


def is_handed(managed: ManagedParam) -> bool:
    """Whether modules want the parameter encoded: all that hold it, or none."""
    takers = [takes_encoded(module, name) for module, name in managed.owners]
    if any(takers) and not all(takers):
        raise VescaleError(
            f"{managed.fqn}: of the modules that share it, some take it encoded (encoded_params) and others do not. "
            f"Let all of them take it, or none."
        )
    return all(takers)


class EncodedGroup(ParamGroup):
    """Parameters of one format that are frozen, or that modules take encoded."""

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        modules: tuple[nn.Module, ...],
        plan: GroupPlan,
        mesh: DataMesh,
        *,
        format: BlockFormat,
        reshard_after_forward: bool | int,
        **options: Any,
    ) -> None:
        self._format = format
        self._handed: Handed | None = None
        self.is_handed = is_handed(managed[0])
        fqns = [each.fqn for each in managed]
        if self.is_handed and any(isinstance(each.param, DTensor) for each in managed):
            raise NotImplementedError(
                f"{fqns}: handing codes of tensor-parallel parameters to modules is not built. Leave them out of "
                f"encoded_params: they are decoded then."
            )
        if self.is_handed and not isinstance(reshard_after_forward, bool):
            raise NotImplementedError(
                f"{fqns}: what is kept over {reshard_after_forward} ranks after forward is decoded, but modules take "
                f"these encoded. Pass reshard_after_forward=True or False to the call that wraps them."
            )
        super().__init__(
            managed, modules, plan, mesh, format=format, reshard_after_forward=reshard_after_forward, **options
        )

    def _make_shards(self, managed: Sequence[ManagedParam], offload_pin: bool | None) -> Shards:
        if managed[0].param.requires_grad:
            return super()._make_shards(managed, offload_pin)
        return StoredShards(managed, self.plan.layout, self.mesh, self._format, offload_pin=offload_pin)

    @property
    def stored(self) -> PlaneMemory | None:
        """What this rank stores encoded."""
        return self.shards.memory if isinstance(self.shards, StoredShards) else None

    def unshard(self, async_op: bool = False) -> None:
        self._refuse_training()
        super().unshard(async_op)

    def _refuse_training(self) -> None:
        if self.stored is not None and self.shards.is_trainable:
            raise VescaleError(
                f"{self.fqns}: were frozen when fully_shard stored them in {self._format.name}, and cannot train from "
                f"codes. Set requires_grad before fully_shard, or leave them frozen."
            )

    def _follow_state_dicts(self) -> None:
        super()._follow_state_dicts()
        if self.stored is None:
            return
        owners: set[Any] = {owner for each in self.shards.managed for owner, _ in each.owners}
        for module in owners:
            # torch marks the hook as registered, which it cannot do to a method.
            self._hooks.append(module.register_state_dict_post_hook(lambda *call: self._put_decoded(*call)))

    @torch.no_grad()
    def _put_decoded(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """A state dict holds decoded values: others can read them, and they are copies."""
        for each in self.shards.managed:
            for owner, name in each.owners:
                value = state_dict.get(prefix + name)
                if owner is module and isinstance(value, DTensor):
                    local = _torch.local_of(value)
                    if isinstance(local, EncodedTensor):
                        state_dict[prefix + name] = _torch.dtensor(local.decode(), _torch.spec_of(value))

    def _start_gathering(self, async_op: bool) -> Gathering:
        assert self.quantized is not None
        if self._kept is not None or (self.stored is None and not self.is_handed):
            return super()._start_gathering(async_op)
        sink: Any = self._handed_planes() if self.is_handed else self._whole_buffer()
        sink.alloc()
        source = self.stored if self.stored is not None else self.shards.buffer
        return self.quantized.start(
            source, sink, self.mesh, comm=self.all_gather_comm, async_op=async_op, traffic=self.traffic
        )

    def _handed_planes(self) -> Handed:
        if self._handed is None:
            assert self.quantized is not None
            self._handed = Handed(self.quantized, self.mesh, self.device)
        return self._handed

    def _make_unsharded(self) -> list[nn.Parameter]:
        if not self.is_handed:
            return super()._make_unsharded()
        planes = self._handed_planes()
        unsharded = []
        with torch.inference_mode(False), torch.no_grad():
            for i, (sharded, shape) in enumerate(zip(self.shards.params, self.shards.shapes, strict=True)):
                encoded = EncodedTensor(
                    planes.memory.whole_payload_of(i),
                    planes.scales[i],
                    self._format,
                    shape=shape,
                    tiled_shape=shape,
                    dtype=self.compute_dtype,
                )
                param = nn.Parameter(encoded, requires_grad=sharded.requires_grad)
                mark_managed(param, self.fqns[i])
                unsharded.append(param)
        return unsharded

    def _forget_unsharded(self) -> None:
        super()._forget_unsharded()
        self._handed = None

    def _free_whole(self) -> None:
        if self._handed is not None:
            self.streams.done_with(self._lane)
            self._handed.free()
        super()._free_whole()
