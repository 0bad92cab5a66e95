"""What torch's own fully_shard attached to a model: read, taken off, and put back, for `from_fsdp2` and `to_fsdp2`.

None of it has a public name; attributes are those of torch 2.6 and later unless said otherwise.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import Placement

from . import _torch

__all__ = ["Fsdp2Param", "Fsdp2Unit", "forget_fsdp2", "fsdp2_units"]


class Fsdp2Param:
    """A parameter that torch's fully_shard manages: the DTensor, and where modules hold it."""

    def __init__(self, found: Any) -> None:
        self._found = found

    @property
    def param(self) -> nn.Parameter:
        return cast(nn.Parameter, self._found.sharded_param)

    @property
    def owners(self) -> tuple[tuple[nn.Module, str], ...]:
        info = self._found._module_info
        return ((info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True))

    @property
    def placement(self) -> Placement:
        return cast(Placement, self._found.fsdp_placement)

    @property
    def mesh_info(self) -> Any:
        return self._found.mesh_info

    @property
    def problem(self) -> str | None:
        """Why the parameter cannot be taken over now."""
        if self._found.is_dtensor:
            return "is tensor-parallel as well, which is not built yet"
        unsharded = getattr(self._found, "_unsharded_param", None)
        if self._found.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
            return "holds gradients that are not reduced yet; reduce them first"
        kind = type(_torch.local_of(self.param))
        if kind is not torch.Tensor:
            return f"is a {kind.__name__}, which gathers itself; build the model again instead"
        if self.param.is_meta:
            return "is on the meta device; call to_empty(device=...) and load it first"
        return None

    def forget(self) -> None:
        """Drop the memory of the shard, which the parameter no longer views."""
        self._found._sharded_param_data = torch.empty(0)

    def replace(self, param: nn.Parameter, local: torch.Tensor) -> None:
        """Let `param` be the sharded parameter with the values `local`, which torch keeps padded to equal sizes."""
        found = self._found
        dim = found.fsdp_placement.dim
        padded = local.new_zeros(found.padded_sharded_param_size)
        mine = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0)
        mine.copy_(local.view_as(mine))
        if found.pin_memory:
            padded = padded.cpu().pin_memory()
            mine = padded.narrow(dim, 0, mine.size(dim))
        _torch.set_placed(param, mine, _torch.spec_of(found.sharded_param))
        found._sharded_param_data = padded.view(-1)
        found.sharded_param = param
        found._setattr_on_modules(param)


class Fsdp2Unit:
    """What one call of torch's fully_shard wrapped, and with which options."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = state._modules
        self._groups = list(state._fsdp_param_groups)
        self.params = [Fsdp2Param(found) for group in self._groups for found in group.fsdp_params]
        self.mesh_info: Any = self._groups[0].mesh_info if self._groups else None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `fully_shard` that say the same."""
        options: dict[str, Any] = {
            "reshard_after_forward": self._reshard_after_forward(),
            "mp_policy": self._state._mp_policy,
        }
        if self._groups:
            options |= {"mesh": self.mesh_info.mesh, "offload_policy": self._groups[0].offload_policy}
        return options

    def _reshard_after_forward(self) -> bool | int | None:
        if self._state._auto_reshard_after_forward or not self._groups:
            return None
        group = self._groups[0]
        if group._use_post_forward_mesh:
            return int(group.post_forward_mesh_info.shard_mesh_size)
        return bool(group._reshard_after_forward)

    @property
    def settings(self) -> dict[str, Any]:
        """What FSDPModule's setters changed since, by the names of the setters' arguments."""
        group = self._groups[0] if self._groups else None
        names = [
            "reduce_grads",
            "all_reduce_grads",
            "reshard_after_backward",
            "unshard_in_backward",
            "gradient_divide_factor",
            "force_sum_reduction_for_comms",
            "reduce_scatter_unused_params",  # 2.13
            "reduce_scatter_max_input_buffers",  # 2.13
        ]
        return {name: getattr(group, name) for name in names if hasattr(group, name)}

    @property
    def prefetched(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Modules to gather ahead, in forward and in backward."""
        forward, backward = self._state._states_to_forward_prefetch, self._state._states_to_backward_prefetch
        return [each._modules[0] for each in forward], [each._modules[0] for each in backward]

    @property
    def problem(self) -> str | None:
        """Why the unit cannot be taken over now."""
        for group in self._groups:
            if group._all_reduce_hook is not None or not _torch.is_torchs_comm(group._all_gather_comm):
                return "has an all-reduce hook or custom collectives; set them again on the new model"
            if group._partial_reduce_output is not None:
                return "holds gradients that are not summed over replicas yet; do that first"
            if group.device.type != "cpu" and any(found.offload_to_cpu for found in group.fsdp_params):
                return "is offloaded to the CPU, from where a mesh of another device cannot send"
        if self._state._state_ctx.iter_forward_root is not None:
            return "is in the middle of an iteration"
        return None

    def remove(self) -> None:
        """Take torch's hooks, state and class off the modules."""
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        for group in self._groups:
            saving, loading = (
                getattr(group, f"_module_to_pre_{what}_state_dict_hook_handle") for what in ("save", "load")
            )
            for handle in (*saving.values(), *loading.values()):
                handle.remove()
            for found in group.fsdp_params:
                found._post_load_hook_handle.remove()
        self.forget()
        for module in self.modules:
            _torch.forget_state(module)
            module.__class__ = type(module).__mro__[cast(Any, type(module))._orig_cls_mro_index]
        for module in {each for root in self.modules for each in root.modules()}:
            for flag in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):  # for dynamo
                module.__dict__.pop(flag, None)

    def forget(self) -> None:
        """Take the modules out of what torch keeps beside them."""
        for module in self.modules:
            _torch.MODULE_STATES.pop(module, None)

    def put_back(self) -> None:
        """Undo `forget`."""
        for module in self.modules:
            _torch.MODULE_STATES[module] = weakref.ref(self._state)


def forget_fsdp2(model: nn.Module) -> None:
    """`Fsdp2Unit.forget` for the whole model, also where a call of torch's fully_shard ended half-way."""
    for module in model.modules():
        if isinstance(_torch.state_of(module), _torch.Fsdp2State):
            _torch.MODULE_STATES.pop(module, None)


def fsdp2_units(model: nn.Module) -> list[Fsdp2Unit]:
    """What torch's fully_shard wrapped in the model, inner calls first."""
    states = dict.fromkeys(
        state
        for module in model.modules()
        if isinstance(state := cast(Any, _torch.state_of(module)), _torch.Fsdp2State)
    )
    return [Fsdp2Unit(state) for state in reversed(states)]
