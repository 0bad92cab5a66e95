"""What a rank keeps of one group: the shard buffer and the DTensor parameters that view it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ragged_dtensor.checkpoint import place_together, take_memory

from .. import _torch
from ..errors import VescaleError
from ..home import Home
from ..layout import Layout
from ..managed import ManagedParam, mark_managed
from ..mesh import DataMesh
from .buffer import DBuffer

__all__ = ["Shards"]


class Shards:
    """The sharded parameters of one group, in plan order, with their storage."""

    def __init__(
        self, managed: Sequence[ManagedParam], layout: Layout, mesh: DataMesh, *, offload_pin: bool | None = None
    ) -> None:
        self.managed = tuple(managed)
        self.layout = layout
        self.mesh = mesh
        self.homes = [each.home or Home.of(each.fqn, each.param, mesh) for each in managed]
        self.shapes = [home.shape for home in self.homes]
        """Of the unsharded parameters on this rank."""
        self.numels = [shape.numel() for shape in self.shapes]
        first = managed[0].param
        self.offload_pin = offload_pin
        self.device = torch.device("cpu") if self.is_offloaded and not first.is_meta else first.device
        self.buffer = self._make_buffer(first.dtype, self.device)
        if self.is_meta:
            place_together(self.buffer.flat)
        self._sections = self.buffer.sections()
        self._pin()
        shards = [home.ragged(layout, i) for i, home in enumerate(self.homes)]
        self.placements = [home.placements(shard) for home, shard in zip(self.homes, shards, strict=True)]
        self._local_shapes = [
            home.local_shape(shard, len(piece))
            for home, shard, piece in zip(self.homes, shards, self.buffer.pieces, strict=True)
        ]
        self.params = [self._shard(i) for i in range(len(managed))]
        # Forget the whole parameters, or they would live as long as the model.
        self.managed = tuple(replace(each, param=param) for each, param in zip(managed, self.params, strict=True))
        self.locals = [_torch.local_of(param) for param in self.params]
        self._zero_padding()

    def _make_buffer(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        return DBuffer.shard(self.layout, self.numels, self.mesh.rank, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    @property
    def nbytes(self) -> int:
        """Of the parameters that this rank keeps, padding included."""
        return self.buffer.nbytes

    @property
    def held(self) -> torch.Tensor:
        """The one flat tensor that this rank's parameters lie in."""
        return self.buffer.flat

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"

    @property
    def is_trainable(self) -> bool:
        return any(param.requires_grad for param in self.params)

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard lives on the CPU and only visits the device to be gathered."""
        return self.offload_pin is not None

    def check_offload(self, fqns: Sequence[str]) -> None:
        if self.is_offloaded and self.device.type != "cpu":
            raise RuntimeError(
                f"parameters should be materialised on the CPU when they are offloaded, but these are on "
                f'{self.device}: {fqns}. Load a CPU state dict or call module.to_empty(device="cpu").'
            )

    def new_buffer(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        """An uninitialised buffer with this rank's layout, for reduced gradients."""
        return DBuffer([lane.numel() for lane in self.buffer.lanes], self.buffer.pieces, dtype=dtype, device=device)

    def local_shaped(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Flat elements of tensor `index` in the shape that its DTensor's local tensor has."""
        return flat.view(self._local_shapes[index])

    def local(self, buffer: DBuffer, index: int) -> torch.Tensor:
        """Tensor `index` of a buffer with this rank's layout."""
        return self.local_shaped(buffer.view(index), index)

    def local_views(self, buffer: DBuffer) -> list[torch.Tensor]:
        """Every tensor of a buffer with this rank's layout, as `local` gives one, and in one call."""
        sizes, places = self._sections
        parts = buffer.flat.split_with_sizes(sizes)
        return [
            parts[place] if len(shape) == 1 else parts[place].view(shape)
            for place, shape in zip(places, self._local_shapes, strict=True)
        ]

    def gradient(self, index: int, local: torch.Tensor) -> DTensor:
        """The DTensor of a reduced gradient, placed as its parameter is."""
        return _torch.dtensor(local, _torch.spec_of(self.params[index]))

    @torch.no_grad()
    def _shard(self, index: int) -> nn.Parameter:
        """The sharded parameter, which carries over what users set on the whole one."""
        managed = self.managed[index]
        param = managed.param
        local = self._local_of(index, managed)
        spec = self._spec(index, param)
        sharded = nn.Parameter(_torch.dtensor(local, spec), requires_grad=param.requires_grad)
        vars(sharded).update(_torch.user_attributes(param))
        mark_managed(sharded, managed.fqn, sharded=True)
        mark_managed(param, managed.fqn)
        for hook in _torch.post_accumulate_hooks(param):
            _torch.on_gradient(sharded, hook)
        return sharded

    def _spec(self, index: int, param: torch.Tensor) -> _torch.DTensorSpec:
        """Of sharded parameter `index`, with the shape and dtype of `param`."""
        return _torch.dtensor_spec(self.homes[index].mesh, self.placements[index], param)

    def _local_of(self, index: int, managed: ManagedParam) -> torch.Tensor:
        """This rank's elements, copied into the buffer."""
        local = self.local(self.buffer, index)
        span = self.layout.shard_range(index, self.numels[index], self.mesh.rank)
        if not managed.param.is_meta:
            param = managed.param.detach()
            whole = _torch.finished(_torch.local_of(param)) if isinstance(param, DTensor) else param
            local.reshape(-1).copy_(whole.reshape(-1)[span.begin : span.end])
        return local

    @torch.no_grad()
    def adopt(self, *, partly_loaded: bool = False) -> bool:
        """Take values that `_apply`, `to_empty` or `load_state_dict(assign=True)` put elsewhere back into the buffer.

        The Parameter objects stay the same, so an optimizer keeps them. Returns whether anything had moved and is back.
        While a state dict is `partly_loaded`, parameters of several dtypes or devices wait for the rest.
        """
        found = self._found()
        moved = [
            new is not old or _torch.local_of(old) is not local
            for new, old, local in zip(found, self.params, self.locals, strict=True)
        ]
        if not any(moved):
            return False
        news = [self._local_value(i, cast(torch.Tensor, new)) for i, new in enumerate(found)]
        if partly_loaded and len({(new.dtype, new.device) for new in news}) > 1:
            return False
        is_taken = self._take_memory(news)
        if not is_taken:
            self._reallocate(news)
        for i, new in enumerate(news):
            local = self.local(self.buffer, i)
            if not new.is_meta and not is_taken:
                local.copy_(new)
            self._point(i, local)
        self._zero_padding()
        return True

    def _take_memory(self, news: Sequence[torch.Tensor]) -> bool:
        """Whether all values lie in one memory as in the buffer, and it is the buffer now: nothing is held twice."""
        placed = [(new, piece) for new, piece in zip(news, self.buffer.pieces, strict=True) if len(piece)]
        storages = {new.untyped_storage().data_ptr() for new, _ in placed if type(new) is torch.Tensor}
        as_planned = all(new.storage_offset() == piece.begin and new.dtype == self.dtype for new, piece in placed)
        if not self.is_meta or len(storages) != 1 or not as_planned or placed[0][0].is_meta:
            return False
        flat = take_memory(placed[0][0])
        if flat is None:
            return False
        self.buffer.replace(flat)
        self.device = flat.device
        self._pin()
        return True

    def _found(self) -> list[nn.Parameter]:
        """What modules hold as these parameters now."""
        return [_newest(each, old) for each, old in zip(self.managed, self.params, strict=True)]

    @torch.no_grad()
    def take_over(self, params: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
        """Let `params`, DTensors that optimizers hold, be the sharded parameters from now on, with these local values.

        The objects stay the same; what they viewed before is no longer used.
        """
        self._reallocate(values)
        for i, (param, value) in enumerate(zip(params, values, strict=True)):
            local = self.local(self.buffer, i)
            local.copy_(value.view_as(local))
            _torch.set_placed(param, local, _torch.with_dtype(_torch.spec_of(self.params[i]), local.dtype))
            mark_managed(param, self.managed[i].fqn, sharded=True)
            self.locals[i] = local
        self.params = list(params)
        self.managed = tuple(replace(each, param=param) for each, param in zip(self.managed, params, strict=True))
        self._zero_padding()

    def _local_value(self, index: int, new: torch.Tensor) -> torch.Tensor:
        """The local values of what a module now holds as its parameter."""
        managed = self.managed[index]
        if not isinstance(new, DTensor):
            raise VescaleError(
                f"{managed.fqn}: expected a sharded parameter (DTensor), found a {type(new).__name__}. Load plain "
                f"tensors without assign=True, or shard them with ragged_dtensor.distribute_tensor first."
            )
        if new.shape != managed.param.shape:
            raise VescaleError(f"{managed.fqn}: expected shape {tuple(managed.param.shape)}, got {tuple(new.shape)}")
        mesh, wanted = self.homes[index].mesh, self.placements[index]
        if new.device_mesh != mesh:
            raise VescaleError(f"{managed.fqn}: expected a DTensor on {mesh}, got one on {new.device_mesh}")
        if new.placements != wanted:
            new = new.redistribute(mesh, [Replicate()] * mesh.ndim).redistribute(placements=wanted)
        return _torch.local_of(new)

    def _reallocate(self, news: Sequence[torch.Tensor]) -> None:
        """A buffer for the new values' dtype and device, if those changed."""
        kinds = {(new.dtype, new.device) for new in news}
        if len(kinds) > 1:
            lines = [f"{each.fqn}: {new.dtype} on {new.device}" for each, new in zip(self.managed, news, strict=True)]
            raise VescaleError(
                "a group's parameters must keep one dtype and device; convert all of:\n" + "\n".join(lines)
            )
        ((dtype, device),) = kinds
        if (dtype, device) != (self.buffer.dtype, self.buffer.flat.device):
            self.buffer = self.new_buffer(dtype, device)
            self.device = device
            self._pin()

    def _point(self, index: int, local: torch.Tensor) -> None:
        """Let parameter `index` view `local`, as the same object."""
        param = self.params[index]
        if (param.dtype, param.device) == (local.dtype, local.device):
            _torch.set_local(param, local)
        else:
            spec = _torch.with_dtype(self._spec(index, param), local.dtype)
            fresh = nn.Parameter(_torch.dtensor(local, spec), requires_grad=param.requires_grad)
            cast(Any, torch.utils.swap_tensors)(param, fresh)
        self.locals[index] = local
        for module, name in self.managed[index].owners:
            module._parameters[name] = param

    def _pin(self) -> None:
        """Page-lock an offloaded shard, so that copies to the device overlap with its work."""
        flat = self.buffer.flat
        if self.offload_pin and flat.device.type == "cpu" and torch.accelerator.is_available():
            self.buffer.replace(flat.pin_memory())

    def _zero_padding(self) -> None:
        if not self.buffer.flat.is_meta:
            self.buffer.zero_gaps()


def _newest(managed: ManagedParam, old: nn.Parameter) -> nn.Parameter:
    """What one of the owners now holds instead of `old`: of tied names, only one may have been assigned yet."""
    held = [module._parameters.get(name) for module, name in managed.owners]
    return next((each for each in held if each is not None and each is not old), old)
