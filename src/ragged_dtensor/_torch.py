"""Every private name of torch that this package uses, and which torch that has to be.

Importing installs nothing: `register()` does, when the first RaggedShard is built. It checks the installed torch and
runs the installers that the `*_seams` files left in `seams`; they put our functions in the place of torch's at the
`Point`s below.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

# Private, all since torch 2.11 or earlier: there is no registry for placements (pytorch#169320).
from torch.distributed import _state_dict_utils  # isort: skip
from torch.distributed.tensor import _api as _typed_api  # isort: skip
from torch.distributed.tensor import _dispatch as _typed_dispatch  # isort: skip
from torch.distributed.tensor import _redistribute as _typed_redistribute  # isort: skip
from torch.distributed.tensor import _utils  # isort: skip
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # isort: skip
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding  # isort: skip
from torch.distributed.tensor.placement_types import _StridedShard  # isort: skip
from torch.distributed.tensor._ops._math_ops import _NormPartial  # isort: skip
from torch._ops import OpOverloadPacket  # isort: skip
from torch.utils._python_dispatch import return_and_correct_aliasing  # isort: skip
from torch.utils._pytree import tree_leaves, tree_map_only  # isort: skip

from ragged_dtensor.errors import UnsupportedTorchError
from ragged_dtensor.seams import seams

__all__ = [
    "DTensorSpec",
    "OpOverloadPacket",
    "OpSchema",
    "OutputSharding",
    "Placement",
    "Point",
    "TensorMeta",
    "local_of",
    "register",
    "seams",
    "tree_leaves",
    "tree_map_only",
]

OLDEST, NEWEST_BEFORE = (2, 11), (2, 15)

# Without types: what is used of them is not exported, and methods are replaced.
_api: Any = _typed_api
_dispatch: Any = _typed_dispatch
_redistribute: Any = _typed_redistribute
_DTensor: Any = DTensor
_dispatcher: Any = DTensor._op_dispatcher


@functools.cache
def register() -> None:
    """Teach the installed torch about ragged placements, once; refuse a torch that lacks what this needs."""
    check_torch()
    for install in seams.installers:
        install()
    torch.serialization.add_safe_globals(list(seams.safe_globals))


# --- which torch


NEEDED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "torch.distributed.tensor._api": (
        _api,
        (
            "_ToTorchTensor",
            "_dtensor_init_helper",
            "_mesh_resources",
            "compute_global_tensor_info",
            "distribute_tensor",
            "redistribute_local_tensor",
        ),
    ),
    "torch.distributed.tensor._dispatch": (_dispatch, ("redistribute_local_tensor",)),
    "torch.distributed.tensor._redistribute": (_redistribute, ("redistribute_local_tensor", "Redistribute")),
    "torch.distributed.tensor._utils": (_utils, ("_compute_local_shape_and_global_offset",)),
    "DTensor._op_dispatcher": (
        DTensor._op_dispatcher,
        (
            "_custom_op_handlers",
            "_dispatch_fast_path_python_tail",
            "_dispatch_get_local_results_slow_path",
            "_propagate_op_sharding_dispatch_slow_path",
            "redistribute_local_args",
            "sharding_propagator",
            "unwrap_to_op_info",
        ),
    ),
    "DTensor._op_dispatcher.sharding_propagator": (
        DTensor._op_dispatcher.sharding_propagator,
        (
            "_propagate_tensor_meta_non_cached",
            "op_to_schema_info",
            "op_to_schema_info_for_single_dim_strategy",
        ),
    ),
    "DTensor": (DTensor, ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__", "redistribute")),
    "torch.distributed._state_dict_utils": (_state_dict_utils, ("_distribute_tensors",)),
    "torch.optim.Optimizer": (torch.optim.Optimizer, ("_process_value_according_to_param_policy",)),
}


def check_torch(version: str = torch.__version__) -> None:
    """Raise UnsupportedTorchError unless this torch is in the supported range and has every name in NEEDED."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    missing = [
        f"{where}.{name}" for where, (owner, names) in NEEDED.items() for name in names if not hasattr(owner, name)
    ]
    if OLDEST <= release < NEWEST_BEFORE and not missing:
        return
    supported = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, NEWEST_BEFORE))}"
    lacks = f" and lacks {', '.join(missing)}" if missing else ""
    raise UnsupportedTorchError(
        f"RaggedShard extends torch {supported}; this is torch {version}{lacks}. Install a supported torch."
    )


# --- what is replaced


@dataclass(frozen=True)
class Point:
    """A function of torch's whose place ours can take: `path` leads to it from `holder`."""

    holder: Any
    path: str

    def replace(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(stock)` where the function `stock` is."""
        *outer, name = self.path.split(".")
        owner = functools.reduce(getattr, outer, self.holder)
        stock = getattr(owner, name)
        ours = functools.wraps(stock)(make(stock))
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(ours) if is_static else ours)

    def replace_everywhere(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """In every module that imported the function by its name, too; those not loaded yet will find ours."""
        stock = getattr(self.holder, self.path)
        ours = functools.wraps(stock)(make(stock))
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType) and vars(module).get(self.path) is stock:
                setattr(module, self.path, ours)


# C++ asks this one on a cache miss, for a sharding, which it caches, or for the result itself. The method that chooses
# a sharding (`propagate_op_sharding_non_cached`) is one step further: errors raised in there lose their type, and it
# cannot return a result.
PROPAGATE = Point(_dispatcher, "_propagate_op_sharding_dispatch_slow_path")
LOCAL_RESULTS = Point(_dispatcher, "_dispatch_get_local_results_slow_path")
REDISTRIBUTE = Point(_DTensor, "redistribute")
REDISTRIBUTE_LOCAL = Point(_redistribute, "redistribute_local_tensor")
REDISTRIBUTE_BACKWARD = Point(_redistribute, "Redistribute.backward")
TO_LOCAL_BACKWARD = Point(_api, "_ToTorchTensor.backward")
GLOBAL_SHAPE = Point(_api, "compute_global_tensor_info")
LOCAL_SHAPE = Point(_utils, "_compute_local_shape_and_global_offset")
RANDOM_FACTORY = Point(_api, "_dtensor_init_helper")
# The seams of `torch.distributed.checkpoint`: DCP's three questions to a DTensor, and full state dicts from rank 0.
WRITE_ITEMS = Point(_DTensor, "__create_write_items__")
CHUNK_LIST = Point(_DTensor, "__create_chunk_list__")
TENSOR_SHARD = Point(_DTensor, "__get_tensor_shard__")
FULL_STATE = Point(_state_dict_utils, "_distribute_tensors")
DATA_PTR = Point(_DTensor, "data_ptr")
# Each value of an optimizer's state dict passes here on its way to the state of its parameter.
OPTIMIZER_STATE = Point(torch.optim.Optimizer, "_process_value_according_to_param_policy")


def custom_handlers() -> dict[Any, Callable[..., Any]]:
    """What torch asks before any sharding, per op; ours to change."""
    return _dispatcher._custom_op_handlers  # type: ignore[no-any-return]


def replace_distribute_tensor(lead: Callable[..., Any], **names: Any) -> None:
    """Give torch's own `distribute_tensor` the code of `lead`, which finds `names` and `_stock` in torch's module.

    Loaders hold the function under names bound before this package was imported, so the function object itself has to
    change, and it calls nothing on the way that could be answered instead: its code is swapped, its identity, signature
    and defaults stay.
    """
    function = _api.distribute_tensor
    stock = types.FunctionType(
        function.__code__, function.__globals__, "stock_distribute_tensor", function.__defaults__
    )
    stock.__kwdefaults__ = function.__kwdefaults__
    function.__globals__["_ragged_dtensor"] = {**names, "stock": stock}
    function.__code__ = lead.__code__


# --- ops


def specs_of(schema: Any) -> list[DTensorSpec]:
    """The specs among the arguments of an op schema, in their order."""
    leaves = torch.utils._pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def run(op: Any, args: tuple[object, ...], kwargs: dict[str, object], op_info: Any, sharding: OutputSharding) -> Any:
    """Carry out an op under `sharding` as torch would, without leaving the sharding in its cache."""
    dispatcher = _dispatcher
    op_info.output_sharding = sharding
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    mesh = op_info.compute_mesh
    participates = mesh.get_coordinate() is not None
    name = op._schema.name
    if name.endswith("_") or any(argument.is_out for argument in op._schema.arguments):
        is_inplace = name.endswith("_")
        return dispatcher._dispatch_fast_path_python_tail(
            op, args, kwargs, mesh, sharding, local, participates, is_inplace, not is_inplace
        )
    return wrap(op, args, kwargs, local, sharding.output_spec)


def wrap(op: Any, args: tuple[object, ...], kwargs: dict[str, object], local: Any, spec: Any) -> Any:
    """Local results (tensors, or lists of them) as DTensors of `spec`; views keep their base."""
    result = _wrap(local, spec)
    return return_and_correct_aliasing(op, args, kwargs, result) if op._schema._is_view_op() else result  # type: ignore[no-untyped-call]


def info_of(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The op's arguments as torch sees them: specs, local tensors, and the mesh."""
    return _dispatcher.unwrap_to_op_info(op, args, kwargs)


def _wrap(local: Any, spec: Any) -> Any:
    if isinstance(local, torch.Tensor):
        return new_dtensor(local, spec, requires_grad=False)
    if isinstance(local, list | tuple):
        return type(local)(_wrap(item, item_spec) for item, item_spec in zip(local, spec, strict=True))
    return local


def local_arguments(op_info: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments with this rank's local tensors in place of the DTensors."""
    if op_info.args_tree_spec is None:
        return tuple(op_info.local_args), dict(op_info.local_kwargs)
    args = _dispatch.pytree.tree_unflatten(list(op_info.local_args), op_info.args_tree_spec)
    return tuple(args), dict(op_info.local_kwargs)


def redistribute_arguments(op_info: Any, schema: OpSchema) -> None:
    """Bring the local arguments to the specs of `schema`."""
    _dispatcher.redistribute_local_args(op_info, schema, False)


def is_tracing() -> bool:
    """Whether torch.compile or make_fx is looking: tensors are fake and shapes may be symbols."""
    return bool(_dispatch._are_we_tracing())


def norm_partial(order: float) -> Placement:
    """A p-norm of which every rank holds that of its own elements; whole as the root of the sum of their powers."""
    return _NormPartial(order)


def first_hashed_argument(op: Any) -> int | None:
    """The position from which on torch's cache tells calls with different numbers apart; None where it has no rule."""
    infos = _schema_infos(op)
    return int(infos[0].static_argnum) if infos else None


def tells_lists_apart(op: Any) -> bool:
    """Whether torch's cache looks at the tensors in an op's lists; where it does not, it knows their number alone."""
    infos = _schema_infos(op)
    return bool(infos and infos[0].needs_pytree)


def hashed_keywords(op: Any) -> set[str]:
    """The keywords of which torch's cache tells calls with different values apart."""
    infos = _schema_infos(op)
    return set(infos[0].static_kwargkey or ()) if infos else set()


def hash_keywords(op: Any, names: Sequence[str]) -> None:
    """Have torch's cache tell calls apart that differ in these keywords, for stock tensors too."""
    for info in _schema_infos(op):
        known = info.static_kwargkey or []
        info.static_kwargkey = [*known, *(name for name in names if name not in known)]


def _schema_infos(op: Any) -> list[Any]:
    """What torch's cache looks at; the first counts. Most pointwise ops are in the second table only."""
    propagator = _dispatcher.sharding_propagator
    tables = (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy)
    return [table[op] for table in tables if op in table]


def decompose(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """A composite op in terms of simpler ones (inference mode shows composites to DTensor), or NotImplemented."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return NotImplemented
    return op.decompose(*args, **kwargs)


def propagate_tensor_meta(op_schema: OpSchema) -> TensorMeta | Sequence[TensorMeta | None] | None:
    """Global shape, stride and dtype of the op's results, by running it on fake full tensors."""
    propagator = _dispatcher.sharding_propagator
    return propagator._propagate_tensor_meta_non_cached(op_schema)  # type: ignore[no-any-return]


# --- tensors


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself: `to_local()` makes a view and an autograd node."""
    local: torch.Tensor = tensor._local_tensor
    return local


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


def new_dtensor(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    """A DTensor around `local` itself, as torch's own op rules build it: no autograd between the two."""
    return _DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-any-return]


# --- collectives


# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def all_gather(flat: torch.Tensor, group: Any) -> torch.Tensor:
    return _all_gather(flat, 0, group)


def reduce_scatter(flat: torch.Tensor, reduce_op: str, group: Any) -> torch.Tensor:
    return _reduce_scatter(flat, reduce_op, 0, group)  # type: ignore[no-any-return]


def all_to_all(flat: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
    return funcol.all_to_all_single(flat, received, sent, group)


def all_reduce(tensor: torch.Tensor, reduce_op: str, group: Any) -> torch.Tensor:
    return funcol.all_reduce(tensor, reduce_op, group)  # type: ignore[no-any-return]


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The finished tensor behind an asynchronous one."""
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def wait_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, once the collectives that write to its memory are done."""
    return funcol.wait_tensor(tensor)  # type: ignore[no-any-return, no-untyped-call]


def broadcast_(tensor: torch.Tensor, source: int, group: Any) -> None:
    """Broadcast in place from a rank of `group`, to be waited for. The public functional one clones."""
    torch.ops._c10d_functional.broadcast_(tensor, source, group.group_name)


def reduce_(tensor: torch.Tensor, reduce_op: str, target: int, group: Any) -> dist.Work:
    """Start to reduce in place to one rank of `group`, by sum for "avg"; the other ranks' tensors become scratch."""
    name = "SUM" if reduce_op == "avg" else reduce_op.upper()  # gloo reduces to one rank by sum, min and max only
    work: dist.Work = dist.reduce(tensor, group_dst=target, op=getattr(dist.ReduceOp, name), group=group, async_op=True)
    return work


def reduce_partial(placement: Placement, local: torch.Tensor, mesh: Any, axis: int) -> torch.Tensor:
    """Partial -> Replicate by the placement's own rule, which subclasses (masked embedding, norms) override."""
    return placement._reduce_value(local, mesh, axis)  # type: ignore[attr-defined, no-any-return]


def partition_partial(placement: Placement, local: torch.Tensor, mesh: Any, axis: int) -> torch.Tensor:
    """Replicate -> Partial: a summand on each rank that together give the replica."""
    return placement._partition_value(local, mesh, axis)  # type: ignore[attr-defined, no-any-return]


def redistribute(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """torch's function, or ours where a placement is ragged."""
    return _redistribute.redistribute_local_tensor(local, current, target)  # type: ignore[no-any-return]


def check_partials(*placements: Sequence[Placement]) -> None:
    """Refuse sums beside maxima, whose order would matter, as torch does."""
    for each in placements:
        _utils.assert_no_mixed_partial_types(each)


def has_strided_shard(placements: Sequence[Placement]) -> bool:
    """Whether torch's own strided shard is among them."""
    return any(isinstance(placement, _StridedShard) for placement in placements)


def has_torch_order(spec: DTensorSpec) -> bool:
    """Whether shards are nested in an order that only torch's own code reads: strided shards, custom shard orders."""
    if has_strided_shard(spec.placements):
        return True
    order = getattr(spec, "shard_order", None)
    return order is not None and order != DTensorSpec.compute_default_shard_order(spec.placements)


def local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    """Of this rank, under placements of torch's own."""
    shape, _ = _utils.compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(shape)


def with_stride_order(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The tensor with its dims laid out in the order of the spec's strides, as for a transposed parameter."""
    meta = spec.tensor_meta
    if meta is None or local.ndim < 2 or 0 in meta.stride or tuple(meta.stride) == contiguous_stride(meta.shape):
        return local
    order = sorted(range(local.ndim), key=lambda dim: (-meta.stride[dim], dim))
    inverse = sorted(range(local.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(inverse)


def norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The norm of each tensor, in one fused call, which torch offers under a private name alone."""
    return list(torch._foreach_norm(list(tensors), order, dtype))


def split(flat: torch.Tensor, numels: Sequence[int]) -> Sequence[torch.Tensor]:
    """`Tensor.split` by sizes, whose Python wrapper is untyped."""
    return torch.functional.split(flat, list(numels))


def current_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The given mesh, or that of the surrounding `with mesh:`."""
    return mesh or _api._mesh_resources.get_current_mesh()
