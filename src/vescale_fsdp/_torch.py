"""Every private torch name that the runtime uses, with the reason and the oldest torch version it was seen in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import repeat
from operator import is_
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import (  # 2.2: where composable APIs keep their state, `fully_shard.state`
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed._composable_state import _module_state_mapping as MODULE_STATES  # 2.0: torch's module -> state
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # 2.0: what functional collectives return
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # 2.8: has no public name
from torch.distributed.fsdp._fully_shard._fsdp_state import (
    FSDPState as Fsdp2State,  # 2.6: what torch attaches to a module
)
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # 2.5: what a DTensor is made from
from torch.distributed.tensor.placement_types import _StridedShard  # 2.5: has no public name
from torch.utils._python_dispatch import TorchDispatchMode  # 1.13: sees each operation; the demo's meter counts with it

__all__ = [
    "MODULE_STATES",
    "AllGather",
    "DTensorSpec",
    "Fsdp2State",
    "ReduceScatter",
    "TorchDispatchMode",
    "all_gather",
    "are_placed_as",
    "attach_state",
    "common_base",
    "concatenated",
    "dtensor",
    "dtensor_spec",
    "finished",
    "flattened",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "forget_state",
    "has_hooks",
    "in_backward",
    "in_fake_mode",
    "in_functorch",
    "is_replicated_by_torch",
    "is_strided_shard",
    "is_torchs_comm",
    "labelled",
    "local_of",
    "locals_of",
    "on_gradient",
    "post_accumulate_hooks",
    "premul_sum",
    "preserve_version",
    "process_group_comms",
    "queue_after_backward",
    "reduce_scatter",
    "regrouped",
    "set_local",
    "set_placed",
    "spec_of",
    "state_of",
    "symmetric_memory_comms",
    "tensor_hooks",
    "twin_of",
    "untraced",
    "user_attributes",
    "version_of",
    "will_accumulate",
    "with_dtype",
    "wrapper",
    "written",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=torch.Tensor)

_FULLY_SHARD = cast(Any, torch_fully_shard).__wrapped__
"""The key under which `torch.distributed.fsdp.fully_shard.state(module)` looks; pipelining asks there (2.8)."""

# torch 2.13 renames the two collectives and warns on the old names.
all_gather = cast(Callable[..., Any], getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
reduce_scatter = cast(Callable[..., Any], getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)


def attach_state(module: nn.Module, state: object) -> None:
    """Make `state` what `fully_shard.state(module)` returns, torch's and ours."""
    module.__dict__.setdefault(STATE_KEY, {})[_FULLY_SHARD] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def state_of(module: nn.Module) -> object | None:
    states = module.__dict__.get(STATE_KEY)
    return states.get(_FULLY_SHARD) if states else None


def forget_state(module: nn.Module) -> None:
    """Undo `attach_state`, torch's or ours."""
    module.__dict__.get(STATE_KEY, {}).pop(_FULLY_SHARD, None)
    module.__dict__.get(REGISTRY_KEY, {}).pop("fully_shard", None)


def is_replicated_by_torch(module: nn.Module) -> bool:
    """Whether torch's `replicate` manages the module: `fully_shard` leaves such modules alone."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def dtensor_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], like: torch.Tensor) -> DTensorSpec:
    """Spec of a DTensor with the shape, stride and dtype of `like`."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype))


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    assert spec.tensor_meta is not None
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def on_gradient(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook(param)` whenever autograd has put a gradient on `param` (public, but torch does not type it)."""
    cast(Any, param).register_post_accumulate_grad_hook(hook)


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local` itself: no autograd, no check, no communication (a tenth of `from_local`'s time).

    Past `DTensor.__init__`, which does nothing and, as dynamo must not enter it, takes most of the time (2.4).
    """
    return cast(DTensor, cast(Any, DTensor).__new__(DTensor, local, spec, requires_grad=False))


def is_strided_shard(placement: Placement) -> bool:
    """Whether it is torch's own shard of every so-maniest block (2.5; `Shard` over several axes, or fused weights)."""
    return isinstance(placement, _StridedShard)


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The axes of all meshes, slices of one root mesh, in one mesh; makes no process groups (2.9).

    Raises RuntimeError, TypeError or AssertionError if they are no such slices.
    """
    return cast(DeviceMesh, cast(Any, DeviceMesh)._concatenate(list(meshes)))


def flattened(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """One axis for the named ones, whose process group is made once (2.6; FSDP2 does the same)."""
    if len(names) == 1:
        return mesh[names[0]]
    return cast(DeviceMesh, cast(Any, mesh[tuple(names)])._flatten("_".join(names)))


def regrouped(mesh: DeviceMesh, num_ranks: int) -> DeviceMesh:
    """A 1-D mesh as (groups, neighbours in groups of `num_ranks`), made as slices of its root mesh are (2.9)."""
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "shard"
    sizes = mesh.size() // num_ranks, num_ranks
    names = f"{name}_groups_of_{num_ranks}", f"{name}_in_groups_of_{num_ranks}"
    return cast(DeviceMesh, cast(Any, mesh)._unflatten(0, sizes, names))


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind an asynchronous collective's result, once it is there (2.1)."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def user_attributes(param: torch.Tensor) -> dict[str, Any]:
    """What users set on a parameter; subclasses keep their parts in the same place, a DTensor its own."""
    if type(param) is not nn.Parameter and type(param) is not DTensor:
        return {}
    own = ("_is_param", "_local_tensor", "_spec")
    return {name: value for name, value in vars(param).items() if name not in own}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, itself: `to_local()` makes a view and an autograd node."""
    return cast(torch.Tensor, cast(Any, tensor)._local_tensor)


def locals_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """`local_of` each."""
    return [tensor._local_tensor for tensor in tensors]


def are_placed_as(tensors: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether each is a DTensor with the very spec of its other one; None or a plain tensor is not."""
    try:
        return all(map(is_, [tensor._spec for tensor in tensors], [other._spec for other in others]))
    except AttributeError:
        return False


def common_base(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one tensor that all are views of (1.0)."""
    bases = [tensor._base for tensor in tensors]
    return bases[0] if all(map(is_, bases, repeat(bases[0]))) else None


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    cast(Any, tensor)._local_tensor = local


def set_placed(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor, the same object, other placements."""
    cast(Any, tensor)._local_tensor = local
    cast(Any, tensor)._spec = spec


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of writes into the tensor and its views (0.4)."""
    return tensor._version


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    return cast(DTensorSpec, cast(Any, tensor)._spec)


def preserve_version(*tensors: torch.Tensor) -> AbstractContextManager[None]:
    """Refill freed parameters without autograd taking it for a modification (2.1; FSDP2 does the same)."""
    return cast(AbstractContextManager[None], cast(Any, torch.autograd)._unsafe_preserve_version_counter(tensors))


def wrapper(cls: type[T], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> T:
    """A tensor of a subclass that has no memory of its own (1.10; torch's own quantised tensors are made so)."""
    return cast(T, cast(Any, torch.Tensor)._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device))


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes into (its schema has no public name; 1.8)."""
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def in_backward() -> bool:
    """Whether this thread runs a backward pass: forwards in it are activation checkpointing's recomputations (2.0)."""
    return torch._C._current_graph_task_id() != -1


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass has ended (what DDP, FSDP1 and FSDP2 use)."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(callback)


def labelled(name: str) -> AbstractContextManager[Any]:
    """Name what runs in here in profiles: a twentieth of `record_function`'s time while no profiler runs (2.1)."""
    if torch.autograd.profiler._is_profiler_enabled:
        return cast(AbstractContextManager[Any], torch.profiler.record_function(name))
    return cast(AbstractContextManager[Any], cast(Any, torch)._C._profiler._RecordFunctionFast(name))


def premul_sum(factor: float) -> Any:
    """NCCL's reduction that multiplies each input by `factor` first (1.13)."""
    return cast(Any, dist.ReduceOp.PREMUL_SUM)(factor)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether someone waits for the tensor's gradient by `register_hook` (0.2)."""
    return bool(cast(Any, tensor)._backward_hooks)


def post_accumulate_hooks(param: torch.Tensor) -> Iterable[Callable[[torch.Tensor], None]]:
    """Hooks from `register_post_accumulate_grad_hook` (2.1): autograd runs them only for gradients that it made."""
    hooks = cast(Any, param)._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


def tensor_hooks(param: torch.Tensor) -> int:
    """How many hooks `register_hook` put on the tensor."""
    return len(getattr(param, "_backward_hooks", None) or ())


def foreach_add_(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], *, alpha: float) -> None:
    """Add `alpha` times each other in one call (1.9); it promotes dtypes as `add_` does."""
    torch._foreach_add_(tuple(tensors), tuple(others), alpha=alpha)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy, and cast, each source in one call (2.1)."""
    if targets:
        torch._foreach_copy_(tuple(targets), tuple(sources))


def foreach_lerp(starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> list[torch.Tensor]:
    """Interpolate each pair in one call (2.0)."""
    return list(torch._foreach_lerp(tuple(starts), tuple(ends), weight))


def foreach_lerp_(starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Interpolate each pair in place in one call (2.0)."""
    torch._foreach_lerp_(tuple(starts), tuple(ends), weight)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply all tensors in one call (1.9; the `_foreach` family has no public names)."""
    torch._foreach_mul_(tuple(tensors), factor)


def foreach_norm(tensors: Sequence[torch.Tensor], order: float) -> Sequence[torch.Tensor]:
    """The norm of each tensor (1.9)."""
    return torch._foreach_norm(tuple(tensors), order)


def twin_of(group: dist.ProcessGroup, made: dict[tuple[int, ...], dist.ProcessGroup]) -> dist.ProcessGroup:
    """A second process group of the same ranks; `made` remembers those of one call."""
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in made:
        made[ranks] = cast(dist.ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True))
    return made[ranks]


def process_group_comms(group: dist.ProcessGroup, device: torch.device) -> tuple[AllGather, ReduceScatter]:
    """Collectives in memory of the process group's own allocator (2.8: NCCL has one)."""
    if not cast(Any, group)._get_backend(device).supports_tensor_alloc(device):
        raise NotImplementedError(f"the {dist.get_backend(group)} backend has no allocator of its own for {device}")
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    gather: Any = collectives.ProcessGroupAllocAllGather(group)
    reduce: Any = collectives.ProcessGroupAllocReduceScatter(group)
    return gather, reduce


def symmetric_memory_comms(
    group: dist.ProcessGroup, device: torch.device, backend: Any
) -> tuple[AllGather, ReduceScatter]:
    """Collectives in symmetric memory (2.11, CUDA alone)."""
    if device.type != "cuda":
        raise NotImplementedError(f"the {dist.get_backend(group)} backend has no symmetric memory on {device}")
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    gather: Any = collectives.SymmMemAllGather(group, backend)
    reduce: Any = collectives.SymmMemReduceScatter(group, backend)
    return gather, reduce


def will_accumulate(param: torch.Tensor) -> bool:
    """Whether the running backward will end in `param.grad`: False under `autograd.grad`, or if other leaves are asked.

    The engine knows (2.1; torch's own hooks on several gradients ask it); under `autograd.grad` it refuses to say.
    """
    try:
        return bool(cast(Any, torch)._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:
        return False


def in_functorch() -> bool:
    """Whether a transform of torch.func is active, such as vmap (2.1)."""
    return bool(cast(Any, torch)._C._functorch.peek_interpreter_stack())


def in_fake_mode() -> bool:
    """Whether FakeTensorMode is active (2.1)."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode() is not None


def untraced(function: F) -> F:
    """Mark a function that dynamo neither enters nor compiles, nor anything below it (2.7; loads no dynamo).

    The same as torch.compiler.disable, which would wrap the function and pay for it in every call.
    """
    frames = cast(Any, torch)._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(cast(FunctionType, function).__code__, frames._FrameExecStrategy(skip, skip))
    cast(Any, function)._torchdynamo_disable = True
    return function


def is_torchs_comm(comm: object) -> bool:
    return type(comm).__module__.startswith("torch.")
