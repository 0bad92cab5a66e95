"""FSDPModule: the methods that a wrapped module gains, torch's names and signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from . import _torch
from .gloo_comms import GlooReduceScatter
from .group.param_group import ParamGroup
from .state import ModuleState, find_state

__all__ = ["FSDPModule", "UnshardHandle"]


class FSDPModule(TorchFSDPModule):
    """A module whose parameters are sharded except while they are used; made by `fully_shard`."""

    # [FSDP<Original>, FSDPModule, torch's FSDPModule, Original, ...]: indexing a container builds the original class.
    _orig_cls_mro_index = 3

    def _get_fsdp_state(self) -> ModuleState:  # type: ignore[override]  # torch's state class is not ours
        state = find_state(cast(nn.Module, self))
        assert state is not None
        return state

    def _groups(self, recurse: bool = False) -> Iterator[ParamGroup]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        for module in modules:
            if isinstance(module, FSDPModule):
                yield from module._get_fsdp_state().groups

    def reshard(self) -> None:
        """Free the unsharded parameters of this module, not of wrapped modules below it."""
        for group in self._groups():
            group.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters; with `async_op`, the returned handle's `wait` makes them usable."""
        groups = list(self._groups())
        for group in groups:
            group.adopt()
            group.unshard(async_op=async_op)
        handle = _UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward pass ends the iteration, so that prefetching forgets its order."""
        self._get_fsdp_state().schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Without it, gradients accumulate on every rank and nothing is communicated until it is set again."""
        for group in self._groups(recurse):
            group.reduction.is_on = requires_gradient_sync
            group.reduction.is_replicated = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """For HSDP: without it, gradients are reduce-scattered and accumulated, but not summed over replicas."""
        for group in self._groups(recurse):
            group.reduction.is_replicated = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change what `fully_shard` was told."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        for module in modules:
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state.reshard_is_automatic = False
                for group in state.groups:
                    group.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Keep parameters gathered after backward, for the next micro-batch."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Modules to gather once this module's own parameters are gathered in forward."""
        self._get_fsdp_state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Modules to gather in backward instead of the one that ran just before this one in forward."""
        self._get_fsdp_state().backward_prefetch = _states_of(modules)

    def set_num_modules_to_forward_prefetch(self, num_modules: int) -> None:
        """Call on the root: gather so many modules ahead in forward, in the order in which they ran in the last one.

        Lists from `set_modules_to_forward_prefetch` come first. 0, the default, gathers nothing ahead in forward; a
        forward in another order than the last one gathers nothing ahead from where it differs. Not in torch.
        """
        if isinstance(num_modules, bool) or not isinstance(num_modules, int) or num_modules < 0:
            raise ValueError(f"num_modules should be an int >= 0, got {num_modules!r}")
        self._get_fsdp_state().schedule.num_forward_prefetch = num_modules

    def set_custom_all_gather(self, comm: _torch.AllGather) -> None:
        """Gather with `comm`, in every group of this module."""
        for group in self._groups():
            group.all_gather_comm = comm

    def set_custom_reduce_scatter(self, comm: _torch.ReduceScatter) -> None:
        """Reduce with `comm`, in every group of this module.

        What is reduced is copied in and out of memory that `comm` allocates, unless it has a true `is_in_place`: it is
        then called with the buffers themselves, may overwrite its input, and allocates nothing (not in torch).
        """
        groups = list(self._groups())
        if isinstance(comm, GlooReduceScatter):
            for group in groups:
                comm.check(group.mesh.group)
        for group in groups:
            group.reduction.comm = comm

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call `hook` on each group's reduced flat gradient, after the reduce-scatter (HSDP: after the all-reduce)."""
        for group in self._groups():
            if stream is not None and group.mesh.replicate_axis is not None:
                raise ValueError("stream cannot be set when using native HSDP: its all-reduce has a stream of its own")
            group.reduction.reset()
            group.reduction.hook = hook
            group.reduction.hook_stream = stream

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next iteration's gathers wait for `event` only."""
        self._get_fsdp_state().schedule.post_optim_event = event

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum over ranks by `factor` instead of their number."""
        for group in self._groups():
            group.reduction.divide_factor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use plain sums in collectives and divide apart from them."""
        for group in self._groups():
            group.reduction.sum_only = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Contribute zeros for parameters without a gradient, so that ranks may use different modules."""
        for group in self._groups(recurse):
            group.reduction.includes_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be under way at once."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        for module in modules:
            if isinstance(module, FSDPModule):
                module._get_fsdp_state().max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce through process groups of their own, so that reductions and gathers overlap."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            group.reduction.group = _torch.twin_of(group.mesh.group, made) if enable else None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say that backward does not need this module's parameters (an embedding's, for example)."""
        for group in self._groups():
            group.unshard_in_backward = unshard_in_backward

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocate buffers with the process group's own allocator."""
        for group in self._groups():
            _refuse_custom_comm(group, "set_allocate_memory_from_process_group_for_comm")
            gather, reduce = _torch.process_group_comms(group.mesh.group, group.device) if enable else (None, None)
            group.all_gather_comm, group.reduction.comm = gather, reduce

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocate gathered buffers in symmetric memory."""
        for group in self._groups():
            _refuse_custom_comm(group, "set_symm_mem_for_comm")
            gather, reduce = _torch.symmetric_memory_comms(group.mesh.group, group.device, backend)
            # NCCL's symmetric reduce-scatter only sums.
            group.all_gather_comm, group.reduction.comm = gather, reduce if group.reduction.sum_only else None

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: drop the iteration, so that the next one starts clean."""
        self._get_fsdp_state().reset_iteration()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        for group in self._groups(recurse=True):
            group.unshard_async_op = async_op

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        for group in self._groups():
            group.to_sharded()
        # Past torch's FSDPModule, whose version looks for torch's state.
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._groups():
            group.adopt()
        return result


class _UnshardHandle(UnshardHandle):
    def __init__(self, groups: list[ParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        for group in self._groups:
            group.wait_for_unshard()
        self._groups = []


def _states_of(modules: Iterable[TorchFSDPModule]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard wrapped, got {type(module)}: {module}")
    return [cast(FSDPModule, module)._get_fsdp_state() for module in modules]


def _refuse_custom_comm(group: ParamGroup, method: str) -> None:
    for comm in (group.all_gather_comm, group.reduction.comm):
        if comm is not None and not _torch.is_torchs_comm(comm):
            raise ValueError(f"{method} cannot be combined with the custom collective {type(comm).__name__}")
