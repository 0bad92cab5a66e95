"""One communication group: its parameters are sharded DTensors at rest and plain views of one buffer while in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _torch
from ..errors import VescaleError
from ..formats.block_format import BlockFormat
from ..managed import ManagedParam, mark_managed
from ..mesh import DataMesh
from ..plan import GroupPlan
from ..policy import MixedPrecisionPolicy
from .buffer import DBuffer
from .full_values import shard_full_values
from .gradients import num_portions
from .kept import KeptShards
from .places import Places
from .quantized import QuantizedGather
from .reduction import Reduction
from .shards import Shards
from .streams import Streams
from .traffic import Traffic
from .transfer import AllGather, Gathering, gather

__all__ = ["ParamGroup", "Phase"]


class Phase(Enum):
    """What a module or group is doing in the running iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class ParamGroup:
    """Parameters of one dtype and mesh that are gathered and reduced together.

    `reshard_after_forward`: False keeps the parameters gathered until backward, True frees them, a number keeps a shard
    over so many ranks, from where backward gathers.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        modules: tuple[nn.Module, ...],
        plan: GroupPlan,
        mesh: DataMesh,
        *,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int,
        offload_pin: bool | None = None,
        format: BlockFormat | None = None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.modules = modules
        self.mp_policy = mp_policy
        self.shards = self._make_shards(managed, offload_pin)
        self.reduction = Reduction(self.shards, mesh)
        self.quantized = None if format is None else QuantizedGather(plan.layout, self.shards.shapes, format)
        self.traffic = Traffic()
        self.streams = Streams()
        self.name = plan.name
        self.fqns = [each.fqn for each in managed]
        self.phase = Phase.IDLE
        self.is_unsharded = False
        self._places = Places(managed, modules)
        self._places.put(self.shards.params, sharded=True)
        self._follow_state_dicts()
        self._whole: DBuffer | None = None
        self._unsharded: list[nn.Parameter] = []
        self._pending: tuple[Gathering, Any] | None = None
        self._lane = 0
        self._kept: KeptShards | None = None
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.unshard_async_op = False
        self.all_gather_comm: AllGather | None = None

    def _make_shards(self, managed: Sequence[ManagedParam], offload_pin: bool | None) -> Shards:
        return Shards(managed, self.plan.layout, self.mesh, offload_pin=offload_pin)

    @property
    def kind(self) -> str:
        """What sets this group apart from others of the same module."""
        frozen = "" if self.shards.is_trainable else ", frozen"
        format = "" if self.quantized is None else f", {self.quantized.format.name}"
        return str(self.shards.dtype).removeprefix("torch.") + frozen + format

    @property
    def device(self) -> torch.device:
        """Of the unsharded parameters."""
        return self.mesh.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the unsharded parameters."""
        stored = self.shards.dtype
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and stored.is_floating_point else stored

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the sum over ranks."""
        return self.mp_policy.reduce_dtype or self.compute_dtype

    @property
    def num_portions(self) -> int:
        """In how many portions the gradients are reduced."""
        return num_portions(self.plan.layout, self.reduce_dtype, self.compute_dtype)

    @property
    def views_shard(self) -> bool:
        """Whether the unsharded parameters are the shard itself: one rank, no cast, no format, no offload."""
        if self.mesh.num_ranks > 1:
            return False
        is_same = self.compute_dtype == self.shards.dtype and self.quantized is None
        return is_same and not self.shards.is_offloaded

    @property
    def registered(self) -> Sequence[nn.Parameter]:
        """The parameters that modules hold at the moment."""
        if self.is_unsharded:
            return self._unsharded
        return self.shards.params if self._kept is None else self._kept.params

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
        self.shards.check_offload(self.fqns)

    def adopt(self, *, partly_loaded: bool = False) -> None:
        """Bring values that were put elsewhere (`_apply`, `assign=True`) back into the buffer."""
        if self.is_unsharded or self._kept is not None or not self.shards.adopt(partly_loaded=partly_loaded):
            return
        if self._unsharded and (self._unsharded[0].dtype, self._unsharded[0].device) != (
            self.compute_dtype,
            self.device,
        ):
            self._forget_unsharded()
            self.reduction.reset()
        elif self.views_shard:
            self._forget_unsharded()

    def adopt_assigned(self) -> None:
        """Values that someone assigned to a module in place of a parameter; nothing is looked at if none were."""
        if self._places.hold(self.registered):
            return
        if self.is_unsharded or self._kept is not None:
            raise VescaleError(
                f"{self.fqns}: one of these was assigned anew while they were gathered, where the assignment is lost. "
                f"Call reshard() before it, or change the parameter in place."
            )
        self.adopt()

    def _forget_unsharded(self) -> None:
        if any(param.grad is not None for param in self._unsharded):
            raise RuntimeError(
                f"{self.fqns}: gradients are held without synchronisation; reduce them before this change"
            )
        self._whole = None
        self._unsharded = []

    def _follow_state_dicts(self) -> None:
        """State dicts hold, and load into, the sharded parameters."""
        owners = {owner for each in self.shards.managed for owner, _ in each.owners}
        self._hooks: list[RemovableHandle] = []
        for module in cast(set[Any], owners | set(self.modules)):
            self._hooks += [
                module.register_state_dict_pre_hook(lambda *_: self.to_sharded()),
                module.register_load_state_dict_pre_hook(self._before_loading),
                module.register_load_state_dict_post_hook(lambda *_: self.adopt(partly_loaded=True)),
            ]

    def take_over(self, params: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
        """Manage these Parameter objects, with these local values, instead of the ones made here."""
        self.shards.take_over(params, values)
        self._places.put(self.shards.params, sharded=True)

    def release(self) -> None:
        """Take the hooks off; the modules keep the sharded parameters."""
        self.to_sharded()
        for hook in self._hooks:
            hook.remove()
        self._places.release()

    def _before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        self.to_sharded()
        shard_full_values(module, self.shards.managed, state_dict, prefix)

    def unshard(self, async_op: bool = False) -> None:
        """Start gathering, unless that is done or under way; `wait_for_unshard` makes the parameters usable."""
        if self.is_unsharded or self._pending is not None:
            return
        if self.phase is Phase.PRE_BACKWARD and not self.unshard_in_backward:
            return
        if self.views_shard:
            self._pending = Gathering(self.shards.buffer.flat), None
            return
        self._lane = self.streams.take_lane()
        with _torch.labelled(f"vescale::all_gather ({self.name})"), self.streams.gathering(self._lane):
            try:
                gathering = self._start_gathering(async_op)
            except RuntimeError as error:
                error.add_note(self._note("gathering"))
                raise
        self._pending = gathering, self.streams.gathered(self._lane)

    def _start_gathering(self, async_op: bool) -> Gathering:
        shard, mesh = (self._kept.buffer, self._kept.mesh) if self._kept else (self.shards.buffer, self.mesh)
        whole = self._whole_buffer()
        whole.alloc()
        comm, traffic = self.all_gather_comm, self.traffic
        # What is kept after forward was decoded before: it is gathered as it is.
        start = gather if self.quantized is None or self._kept else self.quantized.start
        return start(shard, whole, mesh, comm=comm, async_op=async_op, traffic=traffic)

    def wait_for_unshard(self) -> None:
        if self._pending is None:
            return
        try:
            self._end_gathering()
        except RuntimeError as error:
            error.add_note(self._note("gathering"))
            raise
        if not self._unsharded:
            self._unsharded = self._make_unsharded()
        if self.phase is not Phase.PRE_BACKWARD:  # forward has fixed what its backward gives a gradient
            for sharded, unsharded in zip(self.shards.params, self._unsharded, strict=True):
                if sharded.requires_grad != unsharded.requires_grad:
                    unsharded.requires_grad_(sharded.requires_grad)
        self._places.put(self._unsharded, sharded=False)
        self._kept = None
        self.is_unsharded = True

    def reshard(self) -> None:
        """Free the unsharded parameters; in forward only as far as the group reshards after it."""
        if self.phase is Phase.FORWARD and self.is_unsharded:
            if self.reshard_after_forward is False:
                return
            if self.reshard_after_forward is not True and self._whole is not None:
                self._kept = KeptShards(self.shards, self.mesh, self.reshard_after_forward, self._whole)
                self._put_away(self._kept.params)
                return
        self.to_sharded()

    def to_sharded(self) -> None:
        """Free everything but the shard."""
        if self.is_unsharded or self._kept is not None:
            self._kept = None
            self._put_away(self.shards.params)

    def _put_away(self, registered: Sequence[nn.Parameter]) -> None:
        self._places.put(registered, sharded=True)
        if self.is_unsharded:
            self.is_unsharded = False
            self._free_whole()

    def _free_whole(self) -> None:
        if self._whole is not None:
            self.streams.done_with(self._lane)
            self._whole.free()

    def _end_gathering(self) -> None:
        if self._pending is not None:
            gathering, event = self._pending
            self.streams.use(event)
            gathering.wait()
            if self.quantized is not None or self.all_gather_comm is not None:
                self.streams.done_with(self._lane)  # what the wait read from is free now, and the lane's again
            self._pending = None

    def _whole_buffer(self) -> DBuffer:
        if self._whole is None:
            numels, device = self.shards.numels, self.device
            self._whole = DBuffer.whole(self.plan.layout, numels, dtype=self.compute_dtype, device=device)
        return self._whole

    def _make_unsharded(self) -> list[nn.Parameter]:
        """Parameters as they were given, views of the gathered buffer; made once, since autograd keeps references."""
        buffer = self.shards.buffer if self.views_shard else self._whole_buffer()
        unsharded = []
        with torch.inference_mode(False), torch.no_grad():
            for i, sharded in enumerate(self.shards.params):
                whole = self.shards.homes[i].unsharded(buffer.view(i))
                param = nn.Parameter(whole, requires_grad=sharded.requires_grad)
                mark_managed(param, self.fqns[i])
                unsharded.append(param)
        return unsharded

    def post_backward(self) -> None:
        """Free the parameters and reduce what gradients came; nothing to do if neither happened."""
        self.phase = Phase.POST_BACKWARD
        if self.reshard_after_backward:
            self.reshard()
        if not self.reduction.is_due(self._unsharded):
            return
        self._start_reduction()
        if not self.reduction.is_on:
            self.reduction.hold(self._unsharded, self.streams, self.traffic)
            return
        with _torch.labelled(f"vescale::reduce ({self.name})"):
            try:
                self.reduction.run(self._unsharded, self.streams, self.traffic)
            except RuntimeError as error:
                error.add_note(self._note("reducing"))
                raise

    def _start_reduction(self) -> None:
        dtype = self.reduce_dtype
        alone = self.views_shard and dtype == self.compute_dtype
        self.reduction.start(dtype, self.device, num_portions=self.num_portions, alone=alone)

    def writes_gradients(self, index: int) -> bool:
        """Whether `gradient_slot` may be asked for a place: nothing casts, cuts or keeps back that gradient."""
        is_plain = self.shards.homes[index].given is None and type(self.shards.locals[index]) is torch.Tensor
        is_cast = self.reduce_dtype != self.compute_dtype
        return is_plain and self.mesh.num_ranks > 1 and not is_cast and self.quantized is None

    def lends(self, index: int, param: torch.Tensor) -> bool:
        """Whether `param` is what modules hold as parameter `index` while it is gathered."""
        return self.is_unsharded and self._unsharded[index] is param

    def gradient_slot(self, index: int) -> tuple[torch.Tensor, bool] | None:
        """Where backward may write gradient `index` itself, and whether it has to add to what is there."""
        self._start_reduction()
        return self.reduction.slot(index, self.streams)

    def _note(self, doing: str) -> str:
        """What a collective's own error lacks."""
        return (
            f"while {doing} group {self.name!r} ({self.fqns[0]} and {len(self.fqns) - 1} more) over "
            f"{self.mesh.num_ranks} ranks. If only some ranks use this module, see set_reduce_scatter_unused_params."
        )

    @property
    def unreduced(self) -> list[str]:
        """Parameters with a gradient from a backward that the group did not see."""
        if not self.reduction.is_on:
            return []
        written = self.reduction.unreduced
        return [
            fqn
            for i, (fqn, param) in enumerate(zip(self.fqns, self._unsharded, strict=False))
            if param.grad is not None or i in written
        ]

    def finish_backward(self) -> None:
        """The iteration is over."""
        self.drop_gather()
        self.reduction.finish()

    def drop_gather(self) -> None:
        """A gather that nobody used is waited for; what it brought would be old the next time."""
        if self._pending is not None:
            self._end_gathering()
            self._free_whole()

    def reset_iteration(self) -> None:
        """The iteration failed: back to shards, without the gradients it made."""
        self.abandon_forward()
        for param in self._unsharded:
            param.grad = None
        self.reduction.discard()

    def abandon_forward(self) -> None:
        """Back to shards; what is under way is waited for."""
        self.drop_gather()
        self.to_sharded()
        self.phase = Phase.IDLE
