"""One communication group: its parameters are sharded DTensors at rest and plain views of one buffer while in use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from . import _torch
from .buffer import DBuffer
from .gradients import Gradients, OwnGradients
from .managed import ManagedParam
from .mesh import DataMesh
from .plan import GroupPlan
from .policy import MixedPrecisionPolicy
from .shards import Shards
from .traffic import Traffic
from .transfer import Division, Gathering, all_reduce, default_gather, default_reduce_scatter, gather, reduce_scatter

__all__ = ["ParamGroup", "Phase"]


class Phase(Enum):
    """What a module or group is doing in the running iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class ParamGroup:
    """Parameters of one dtype and mesh that are gathered and reduced together."""

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        modules: tuple[nn.Module, ...],
        plan: GroupPlan,
        mesh: DataMesh,
        *,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.modules = modules
        self.mp_policy = mp_policy
        self.shards = Shards(managed, plan.layout, mesh)
        self.traffic = Traffic()
        self.name = plan.name
        self.fqns = [each.fqn for each in managed]
        self.phase = Phase.IDLE
        self.is_unsharded = False
        self._owners = _Owners(managed)
        self._owners.put(self.shards.params)
        self._follow_state_dicts()
        self._whole: DBuffer | None = None
        self._unsharded: list[nn.Parameter] = []
        self._gradients: Gradients | OwnGradients | None = None
        self._pending: Gathering | None = None

        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.unshard_async_op = False
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.reduce_unused = False
        self.divide_factor: float | None = None
        self.sum_only = False
        self.all_gather_comm: Callable[..., Any] = default_gather
        self.reduce_scatter_comm: Callable[..., Any] = default_reduce_scatter
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None

    # Parameters

    @property
    def kind(self) -> str:
        """What sets this group apart from others of the same module."""
        frozen = "" if self.shards.params[0].requires_grad else ", frozen"
        return str(self.shards.dtype).removeprefix("torch.") + frozen

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the unsharded parameters."""
        stored = self.shards.dtype
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and stored.is_floating_point else stored

    @property
    def views_shard(self) -> bool:
        """Whether the unsharded parameters are the shard itself: one rank, no cast."""
        return self.mesh.num_ranks == 1 and self.compute_dtype == self.shards.dtype

    def prepare(self, name: str, fqns: Sequence[str]) -> None:
        """Before the first use: take the names below the root, and what was loaded or materialised since wrapping."""
        self.name = name
        self.fqns = list(fqns)
        specs = tuple(replace(spec, fqn=fqn) for spec, fqn in zip(self.plan.specs, fqns, strict=True))
        self.plan = replace(self.plan, name=name, specs=specs)
        self.adopt()
        if self.shards.is_meta:
            raise RuntimeError(
                f"parameters are still on the meta device: {self.fqns}. Call module.to_empty(device=...) and "
                f"initialise them before training."
            )

    def adopt(self, *, partly_loaded: bool = False) -> None:
        """Bring values that were put elsewhere (`_apply`, `assign=True`) back into the buffer."""
        if not self.is_unsharded and self.shards.adopt(partly_loaded=partly_loaded):
            self._forget_unsharded()

    def _follow_state_dicts(self) -> None:
        """State dicts hold, and load into, the sharded parameters."""
        owners = {owner for each in self.shards.managed for owner, _ in each.owners}
        for module in cast(set[Any], owners | set(self.modules)):
            module.register_state_dict_pre_hook(lambda *_: self.to_sharded())
            module.register_load_state_dict_pre_hook(lambda *_: self.to_sharded())
            module.register_load_state_dict_post_hook(lambda *_: self.adopt(partly_loaded=True))

    def _forget_unsharded(self) -> None:
        self._whole = None
        self._unsharded = []
        self._gradients = None

    # Gather

    def unshard(self, async_op: bool = False) -> None:
        """Start gathering, unless that is done or under way; `wait_for_unshard` makes the parameters usable."""
        if self.is_unsharded or self._pending is not None:
            return
        if self.phase is Phase.PRE_BACKWARD and not self.unshard_in_backward:
            return
        if self.views_shard:
            self._pending = Gathering(self.shards.buffer)
            return
        whole = self._whole_buffer()
        with torch.profiler.record_function(f"vescale::all_gather ({self.name})"):
            whole.alloc()
            self._pending = gather(
                self.shards.buffer,
                whole,
                self.mesh,
                comm=self.all_gather_comm,
                async_op=async_op,
                traffic=self.traffic,
            )

    def wait_for_unshard(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        if not self._unsharded:
            self._unsharded = self._make_unsharded()
        for sharded, unsharded in zip(self.shards.params, self._unsharded, strict=True):
            if sharded.requires_grad != unsharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
        self._owners.put(self._unsharded)
        self.is_unsharded = True

    def reshard(self) -> None:
        """Free the unsharded parameters; in forward only if the group reshards after it."""
        if self.phase is Phase.FORWARD and not self.reshard_after_forward:
            return
        self.to_sharded()

    def to_sharded(self) -> None:
        if not self.is_unsharded:
            return
        self._owners.put(self.shards.params)
        self.is_unsharded = False
        if self._whole is not None:
            self._whole.free()

    def _whole_buffer(self) -> DBuffer:
        if self._whole is None:
            numels, device = self.shards.numels, self.device
            self._whole = DBuffer.whole(self.plan.layout, numels, dtype=self.compute_dtype, device=device)
        return self._whole

    def _make_unsharded(self) -> list[nn.Parameter]:
        """Plain parameters that view the gathered buffer; made once, since autograd keeps references to them."""
        buffer = self.shards.buffer if self.views_shard else self._whole_buffer()
        group = weakref.ref(self)
        unsharded = []
        with torch.inference_mode(False), torch.no_grad():
            for i, sharded in enumerate(self.shards.params):
                view = buffer.view(i).view(sharded.shape)
                param = nn.Parameter(view, requires_grad=sharded.requires_grad)
                if param.dtype.is_floating_point or param.dtype.is_complex:
                    trainable, param.requires_grad = param.requires_grad, True
                    _torch.on_gradient(param, partial(_take_gradient, group, i))
                    param.requires_grad = trainable
                unsharded.append(param)
        return unsharded

    # Gradients

    @property
    def gradients(self) -> Gradients | OwnGradients:
        if self._gradients is None:
            self._gradients = self._make_gradients()
        return self._gradients

    def _make_gradients(self) -> Gradients | OwnGradients:
        dtype = self.compute_dtype
        reduce_dtype = self.mp_policy.reduce_dtype or dtype
        is_alone = self.views_shard and self.mesh.num_replicas == 1 and self.all_reduce_hook is None
        if is_alone and reduce_dtype == dtype:
            return OwnGradients(len(self.shards.params))
        return Gradients(
            self.plan.layout,
            [param.shape for param in self.shards.params],
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            device=self.device,
            traffic=self.traffic,
        )

    def take_gradient(self, index: int, param: torch.Tensor) -> None:
        self.gradients.take(index, param, hold=not self.reduce_grads)

    def post_backward(self) -> None:
        """Free the parameters and reduce what gradients came; nothing to do if neither happened."""
        self.phase = Phase.POST_BACKWARD
        if self.reshard_after_backward:
            self.reshard()
        if not self.reduce_grads:
            return
        has_gradients = self._gradients is not None and self._gradients.any
        if has_gradients or (self.reduce_unused and any(param.requires_grad for param in self.shards.params)):
            with torch.profiler.record_function(f"vescale::reduce ({self.name})"), torch.no_grad():
                self._reduce()

    def finish_backward(self) -> None:
        """Wait for a gather that nobody used."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if self._whole is not None:
                self._whole.free()

    def _reduce(self) -> None:
        gradients = self.gradients
        if isinstance(gradients, OwnGradients):
            self._deliver_own(gradients)
            return
        filled = gradients.seal()
        division = Division.choose(self.mesh, gradients.whole.dtype, factor=self.divide_factor, sum_only=self.sum_only)
        reduced = self.shards.new_buffer(gradients.whole.dtype)
        reduce_scatter(
            gradients.whole, reduced, self.mesh, division, comm=self.reduce_scatter_comm, traffic=self.traffic
        )
        gradients.clear()
        all_reduce(reduced, self.mesh, division, traffic=self.traffic)
        if self.all_reduce_hook is not None:
            self.all_reduce_hook(reduced.flat)
        if division.after != 1:
            reduced.flat.div_(division.after)
        if reduced.dtype != self.shards.dtype:
            stored = self.shards.new_buffer(self.shards.dtype)
            stored.flat.copy_(reduced.flat)
            reduced = stored
        self._deliver(reduced, filled)

    def _deliver_own(self, gradients: OwnGradients) -> None:
        for i, (param, grad) in enumerate(zip(self.shards.params, gradients.pop(), strict=True)):
            if grad is None and self.reduce_unused and param.requires_grad:
                grad = torch.zeros(param.shape, dtype=param.dtype, device=self.device)
            if grad is not None:
                if self.divide_factor is not None:
                    grad.div_(self.divide_factor)
                self._deliver_one(i, self.shards.local_shaped(grad.reshape(-1), i))

    def _deliver(self, reduced: DBuffer, filled: list[int]) -> None:
        """Make the reduced gradients the `.grad` of the sharded parameters, or add to what is there."""
        with_gradient = set(filled)
        for i, param in enumerate(self.shards.params):
            if not param.requires_grad:
                continue
            local = self.shards.local(reduced, i)
            # Another rank may have used a parameter that this one did not: its gradient counts.
            if i not in with_gradient and not self.reduce_unused and not local.any():
                continue
            self._deliver_one(i, local)

    def _deliver_one(self, index: int, local: torch.Tensor) -> None:
        param = self.shards.params[index]
        if param.grad is None:
            param.grad = self.shards.gradient(index, local)
        else:
            _torch.local_of(param.grad).add_(local)
        for hook in _torch.post_accumulate_hooks(param):
            hook(param)


class _Owners:
    """The places in modules that hold a group's parameters."""

    def __init__(self, managed: Sequence[ManagedParam]) -> None:
        self._fast: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        self._slow: list[tuple[nn.Module, str, int]] = []
        for i, each in enumerate(managed):
            for module, name in each.owners:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    self._fast.append((module._parameters, name, i))
                else:
                    self._slow.append((module, name, i))

    def put(self, params: Sequence[nn.Parameter]) -> None:
        # nn.Module.__setattr__ checks what we know, and costs ten times as much.
        for parameters, name, i in self._fast:
            parameters[name] = params[i]
        for module, name, i in self._slow:
            setattr(module, name, params[i])


def _take_gradient(group: weakref.ref[ParamGroup], index: int, param: torch.Tensor) -> None:
    owner = group()
    assert owner is not None
    owner.take_gradient(index, param)
