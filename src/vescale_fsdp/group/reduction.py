"""From autograd's gradients to the `.grad` of one group's sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch
from ..mesh import DataMesh
from .buffer import DBuffer
from .gradients import Gradients
from .shards import Shards
from .streams import Streams
from .traffic import Traffic
from .transfer import Division, ReduceScatter, all_reduce, reduce_scatter

__all__ = ["Reduction"]


class Reduction:
    """Takes autograd's gradients, sums them over ranks, and delivers them; the settings are the user's."""

    def __init__(self, shards: Shards, mesh: DataMesh) -> None:
        self._shards = shards
        self._mesh = mesh
        self._gradients: Gradients | None = None
        self._is_started = False
        self._partial: DBuffer | None = None
        """HSDP: what has been reduced within the replica but not yet over replicas."""
        self._delivered: set[int] = set()
        """Parameters whose gradient this iteration delivered: what a failed iteration takes back."""
        self._is_running = False
        self._copied: Any = None
        """The event after which gradients have arrived on the CPU."""
        self.is_on = True
        self.is_replicated = True
        self.includes_unused = False
        self.divide_factor: float | None = None
        self.sum_only = False
        self.comm: ReduceScatter | None = None
        self.group: dist.ProcessGroup | None = None
        self.hook: Callable[[torch.Tensor], None] | None = None
        self.hook_stream: Any = None

    def start(self, dtype: torch.dtype, device: torch.device, *, num_portions: int, alone: bool) -> None:
        """Get ready to reduce in `dtype`; `alone`: the unsharded parameters are the shard itself, and nothing moves."""
        if self._is_started:
            return
        self._is_started = True
        if not alone or self._mesh.num_replicas > 1 or self.hook is not None:
            self._gradients = Gradients(
                self._shards.layout, self._shards.homes, dtype=dtype, device=device, num_portions=num_portions
            )

    def is_due(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether a reduction of the gradients of `params`, the unsharded parameters, has to happen now."""
        held = self._gradients is not None and self._gradients.any
        return held or any(param.grad is not None for param in params) or self._shards_unused

    def slot(self, index: int, streams: Streams) -> tuple[torch.Tensor, bool] | None:
        """The part of the input that gradient `index` has, and whether one is there; None if nothing moves."""
        if self._gradients is None:
            return None
        self._settle(streams)
        return self._gradients.slot(index)

    @property
    def unreduced(self) -> list[int]:
        """Gradients that lie in the input."""
        if self._gradients is None or not self._gradients.any:
            return []
        return [i for i, is_filled in enumerate(self._gradients.filled) if is_filled]

    @property
    def _shards_unused(self) -> bool:
        return self.includes_unused and self._shards.is_trainable

    @property
    def holds_memory(self) -> bool:
        return self._gradients is not None and self._gradients.any

    @torch.no_grad()
    def hold(self, params: Sequence[torch.Tensor], streams: Streams, traffic: Traffic) -> None:
        """Keep the gradients for a later reduction."""
        if self._gradients is not None:
            self._settle(streams)
            traffic.copied_bytes += self._gradients.hold(params)

    @torch.no_grad()
    def run(self, params: Sequence[torch.Tensor], streams: Streams, traffic: Traffic) -> None:
        """Reduce the gradients of the unsharded `params` and make them those of the sharded ones."""
        gradients = self._gradients
        if gradients is None:
            self._deliver_own(params)
            return
        self._settle(streams)
        factor = self.divide_factor if self.divide_factor is not None else self._mesh.num_contributions
        division = Division.choose(self._mesh, gradients.dtype, factor=factor, sum_only=self.sum_only)
        streams.start_reduction()
        reduced, filled = self._reduce(gradients, params, division, streams, traffic)
        with streams.after_reduction():
            if self._sum_over_replicas(reduced, division, traffic):
                if self.hook is not None:
                    with streams.on(self.hook_stream):
                        self.hook(reduced.flat)
                if division.after != 1:
                    reduced.flat.div_(division.after)
                self._deliver(self._stored(reduced), filled)
        self._is_running = True

    def _reduce(
        self,
        gradients: Gradients,
        params: Sequence[torch.Tensor],
        division: Division,
        streams: Streams,
        traffic: Traffic,
    ) -> tuple[DBuffer, list[bool]]:
        """Sum over ranks, portion by portion; returns this rank's part, and which parameters had a gradient."""
        grads = gradients.take(params)
        traffic.copied_bytes += gradients.nbytes(grads)
        filled = [held or i in grads for i, held in enumerate(gradients.filled)]
        reduced: DBuffer | None = None
        for portion in gradients.inputs:
            portion.put(grads, gradients.filled)
            portion.seal(filled)
            if portion is gradients.inputs[-1]:
                grads.clear()
            with streams.reducing():
                reduced = reduced or self._shards.new_buffer(gradients.dtype, gradients.device)
                targets = reduced.lanes if len(gradients.inputs) == 1 else portion.columns_of(reduced)
                reduce_scatter(
                    portion.buffer, targets, self._mesh, division, comm=self.comm, group=self.group, traffic=traffic
                )
            streams.reduced(portion.buffer.free)
        assert reduced is not None
        gradients.forget()
        return reduced, filled

    def _settle(self, streams: Streams) -> None:
        """Before the buffer is written: a module used twice in one backward may still be reducing from it."""
        if self._is_running:
            streams.settle()
            self._is_running = False

    def _sum_over_replicas(self, reduced: DBuffer, division: Division, traffic: Traffic) -> bool:
        """Whether `reduced` is complete; without the all-reduce it is kept for the next reduction."""
        if self._mesh.num_replicas == 1:
            return True
        if self._partial is not None:
            self._partial.flat.add_(reduced.flat)
        if not self.is_replicated:
            if self._partial is None:
                # As wide as the stored gradient: sums over micro-batches do not lose what the wire would.
                wide = torch.promote_types(reduced.dtype, self._shards.dtype)
                self._partial = self._shards.new_buffer(wide, reduced.flat.device)
                self._partial.flat.copy_(reduced.flat)
            return False
        if self._partial is not None:
            reduced.flat.copy_(self._partial.flat)
            self._partial = None
        all_reduce(reduced, self._mesh, division, traffic=traffic)
        return True

    def _stored(self, reduced: DBuffer) -> DBuffer:
        """The gradients in the parameters' own dtype and on their device."""
        dtype, device = self._shards.dtype, self._shards.device
        if (reduced.dtype, reduced.flat.device) == (dtype, device):
            return reduced
        stored = self._shards.new_buffer(dtype, device)
        in_use = any(param.grad is not None or _torch.post_accumulate_hooks(param) for param in self._shards.params)
        leaves_device = reduced.flat.device != device
        stored.flat.copy_(reduced.flat, non_blocking=leaves_device and not in_use)
        if leaves_device and not in_use:
            self._copied = torch.accelerator.current_stream(reduced.flat.device).record_event()
        return stored

    def _deliver(self, reduced: DBuffer, filled: list[bool]) -> None:
        for i, (param, local) in enumerate(zip(self._shards.params, self._shards.local_views(reduced), strict=True)):
            # Another rank may have used a parameter that this one did not: its gradient counts.
            if param.requires_grad and (filled[i] or self.includes_unused or local.any()):
                self._deliver_one(i, local)

    def _deliver_own(self, params: Sequence[torch.Tensor]) -> None:
        """Autograd's own tensors become the gradients: one rank needs neither copy nor reduction."""
        factor = self.divide_factor if self.divide_factor is not None else self._mesh.num_contributions
        for i, (param, unsharded) in enumerate(zip(self._shards.params, params, strict=True)):
            grad, unsharded.grad = unsharded.grad, None
            if grad is None and self.includes_unused and param.requires_grad:
                local = torch.zeros(self._shards.shapes[i], dtype=param.dtype, device=param.device)
            elif grad is not None:
                local = self._shards.homes[i].local_gradient(grad, param.dtype)
                if factor is not None:
                    local.div_(factor)
            else:
                continue
            self._deliver_one(i, self._shards.local_shaped(local.reshape(-1), i))

    def _deliver_one(self, index: int, local: torch.Tensor) -> None:
        param = self._shards.params[index]
        if param.grad is None:
            param.grad = self._shards.gradient(index, local)
        else:
            _torch.local_of(param.grad).add_(local)
        self._delivered.add(index)
        for hook in _torch.post_accumulate_hooks(param):
            hook(param)

    def finish(self) -> None:
        """The iteration is good: gradients are where the optimizer looks for them, and stay."""
        self._delivered.clear()
        self._is_running = False
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def discard(self) -> None:
        """The iteration failed: drop every gradient that it made."""
        for index in self._delivered:
            self._shards.params[index].grad = None
        self._partial = None
        self.finish()
        self._gradients = None
        self._is_started = False

    def reset(self) -> None:
        """The dtype, device or owner of the gradients changes: allocate anew when the next one comes."""
        if self.holds_memory:
            raise RuntimeError("gradients are held without synchronisation; reduce or discard them before this change")
        self._gradients = None
        self._is_started = False
