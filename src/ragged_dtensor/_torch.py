"""Every private name of torch that this package uses, and the seams through which torch reaches our code.

Importing installs nothing: `register()` does, when the first RaggedShard is built. Each seam asks `seams` whether a
placement is ragged and leaves everything else to torch. Where `seams` has no answer, a ragged tensor raises.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

# Private, all since torch 2.11 or earlier: there is no registry for placements (pytorch#169320).
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

from ragged_dtensor.errors import RaggedShardError, UnsupportedTorchError
from ragged_dtensor.seams import seams

__all__ = [
    "DTensorSpec",
    "OpOverloadPacket",
    "OpSchema",
    "OutputSharding",
    "Placement",
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


@functools.cache
def register() -> None:
    """Teach the installed torch about ragged placements, once; refuse a torch that lacks what this needs."""
    check_torch()
    _install_op_seams()
    _install_movement_seams()
    _install_local_tensor_seams()
    _install_distribute_seam()
    _install_random_factories()
    _install_checkpoint_seams()
    _install_staging_seam()
    _install_full_state_seam()
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
    "DTensor": (DTensor, ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")),
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


# --- ops


def _install_op_seams() -> None:
    """C++ asks Python on a cache miss: for a sharding, which it caches, or for the result itself.

    The method that chooses a sharding (`propagate_op_sharding_non_cached`) is one step further: errors raised in there
    lose their type, and it cannot return a result.
    """
    dispatcher = _DTensor._op_dispatcher
    stock = dispatcher._propagate_op_sharding_dispatch_slow_path

    @functools.wraps(stock)
    def answer(op: Any, args: tuple[object, ...], kwargs: dict[str, object], op_info: Any, try_cache: bool) -> Any:
        if any(seams.any_ragged(spec.placements) for spec in specs_of(op_info.schema)):
            return seams.answer(op, args, kwargs, op_info)
        return stock(op, args, kwargs, op_info, try_cache)

    dispatcher._propagate_op_sharding_dispatch_slow_path = answer
    for op, handler in dispatcher._custom_op_handlers.items():
        if op not in SAFE_HANDLERS:
            dispatcher._custom_op_handlers[op] = _guarded(handler)


def specs_of(schema: Any) -> list[DTensorSpec]:
    """The specs among the arguments of an op schema, in their order."""
    leaves = torch.utils._pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _guarded(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of torch's, asked before any sharding, that leaves ragged operands to us."""

    @functools.wraps(stock)
    def handle(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        op_info = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs)
        if not any(seams.any_ragged(spec.placements) for spec in specs_of(op_info.schema)):
            return stock(op, args, kwargs)
        result = seams.answer(op, args, kwargs, op_info)
        return run(op, args, kwargs, op_info, result) if isinstance(result, OutputSharding) else result

    return handle


def run(op: Any, args: tuple[object, ...], kwargs: dict[str, object], op_info: Any, sharding: OutputSharding) -> Any:
    """Carry out an op under `sharding` as torch would, without leaving the sharding in its cache."""
    dispatcher = DTensor._op_dispatcher
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
    DTensor._op_dispatcher.redistribute_local_args(op_info, schema, False)


def is_tracing() -> bool:
    """Whether torch.compile or make_fx is looking: tensors are fake and shapes may be symbols."""
    return bool(_dispatch._are_we_tracing())


def norm_partial(order: float) -> Placement:
    """A p-norm of which every rank holds that of its own elements; whole as the root of the sum of their powers."""
    return _NormPartial(order)


def first_hashed_argument(op: Any) -> int | None:
    """The position from which on torch's cache tells calls with different numbers apart; None where it has no rule."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    # Most pointwise ops are in the second table.
    for table in (propagator.op_to_schema_info_for_single_dim_strategy, propagator.op_to_schema_info):
        if op in table:
            return int(table[op].static_argnum)
    return None


def decompose(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """A composite op in terms of simpler ones (inference mode shows composites to DTensor), or NotImplemented."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return NotImplemented
    return op.decompose(*args, **kwargs)


# These two look at the shape or at the local memory alone and are right for any placement.
SAFE_HANDLERS = {torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default}


def propagate_tensor_meta(op_schema: OpSchema) -> TensorMeta | Sequence[TensorMeta | None] | None:
    """Global shape, stride and dtype of the op's results, by running it on fake full tensors."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return propagator._propagate_tensor_meta_non_cached(op_schema)


# --- movement


def _install_movement_seams() -> None:
    stock = _redistribute.redistribute_local_tensor

    @functools.wraps(stock)
    def redistribute_local_tensor(
        local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        if seams.any_ragged(current_spec.placements) or seams.any_ragged(target_spec.placements):
            async_op = options.get("async_op", False)
            return seams.redistribute(local_tensor, current_spec, target_spec, async_op=async_op)
        return stock(local_tensor, current_spec, target_spec, **options)  # type: ignore[no-any-return]

    _replace_everywhere("redistribute_local_tensor", stock, redistribute_local_tensor)
    _install_gradient_of_partial()


def _replace_everywhere(name: str, stock: Any, ours: Any) -> None:
    """In every module that imported it by name; those not loaded yet will find ours where torch defines it."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and vars(module).get(name) is stock:
            setattr(module, name, ours)


def _install_gradient_of_partial() -> None:
    """The gradient of Partial -> Ragged is Replicate, as torch has it for Partial -> Shard."""
    stock = _redistribute.Redistribute.backward

    def backward(ctx: Any, grad_output: DTensor) -> Any:
        spec = ctx.current_spec
        pairs = zip(grad_output.placements, spec.placements, strict=True)
        placements = tuple(
            Replicate() if seams.is_ragged(grad) and source.is_partial() else source for grad, source in pairs
        )
        if placements != spec.placements:
            ctx.current_spec = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        return stock(ctx, grad_output)

    _redistribute.Redistribute.backward = staticmethod(backward)


# --- local tensors


def _install_local_tensor_seams() -> None:
    _install_to_local_gradient()
    _install_global_shape()
    _install_local_shape()


def _install_to_local_gradient() -> None:
    """A local gradient becomes a DTensor of the full tensor's shape and stride, which a flat cut cannot tell."""
    stock = _api._ToTorchTensor.backward

    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[DTensor | None, None]:
        spec = ctx.dtensor_spec
        if grad_output is None or not seams.any_ragged((*spec.placements, *(ctx.grad_placements or ()))):
            return stock(ctx, grad_output)  # type: ignore[no-any-return]
        placements = ctx.grad_placements or [Replicate() if p.is_partial() else p for p in spec.placements]
        shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
        return DTensor.from_local(grad_output.contiguous(), spec.mesh, placements, shape=shape, stride=stride), None

    _api._ToTorchTensor.backward = staticmethod(backward)


def _install_global_shape() -> None:
    """`DTensor.from_local` without a shape asks C++, which refuses an unknown placement."""
    stock = _api.compute_global_tensor_info

    def compute_global_tensor_info(
        tensor: torch.Tensor, mesh: Any, placements: Sequence[Placement]
    ) -> tuple[list[int], list[int]]:
        if not seams.any_ragged(placements):
            return stock(tensor, mesh, placements)  # type: ignore[no-any-return]
        shape = seams.global_shape(tensor, mesh, placements)
        return list(shape), list(contiguous_stride(shape))

    _api.compute_global_tensor_info = compute_global_tensor_info


def _install_local_shape() -> None:
    """Factories, loaders and checkpoints ask for a box per rank and would take a ragged shard for a replica."""
    stock = _utils._compute_local_shape_and_global_offset

    @functools.wraps(stock)
    def compute(
        global_shape: Any,
        mesh_shape: Any,
        my_coordinate: Any,
        placements: Sequence[Placement],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not seams.any_ragged(placements):
            return stock(global_shape, mesh_shape, my_coordinate, placements, *args, **kwargs)
        if not (args[0] if args else kwargs.get("skip_offset", False)):
            raise RaggedShardError(
                f"A shard of {tuple(placements)} is not one box of the full tensor, so it has no single offset. "
                "Ask ragged_dtensor.ownership.piece_of(...).boxes(), or redistribute first."
            )
        lookup = my_coordinate.__getitem__ if isinstance(my_coordinate, list | tuple) else my_coordinate
        coordinate = [lookup(axis) for axis in range(len(placements))]
        return seams.local_shape(tuple(global_shape), placements, tuple(mesh_shape), coordinate), ()

    _replace_everywhere("_compute_local_shape_and_global_offset", stock, compute)


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


def new_dtensor(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    """A DTensor around `local` itself, as torch's own op rules build it: no autograd between the two."""
    return _DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-any-return]


# --- distribute_tensor


def _install_distribute_seam() -> None:
    """Lead torch's own `distribute_tensor` to ours when a placement is ragged.

    Loaders hold it under names bound before this package was imported, so the function object itself has to change, and
    it calls nothing on the way that could be answered instead: its code is swapped, its identity, signature and
    defaults stay.
    """
    function = _api.distribute_tensor
    stock = types.FunctionType(
        function.__code__, function.__globals__, "stock_distribute_tensor", function.__defaults__
    )
    stock.__kwdefaults__ = function.__kwdefaults__
    function.__globals__["_ragged_dtensor"] = (seams, stock)
    function.__code__ = _lead.__code__


def _lead(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
) -> Any:  # pragma: no cover - only its code is used, with the globals of torch's module
    seams, stock = _ragged_dtensor  # type: ignore[name-defined]  # noqa: F821
    if seams.any_ragged(placements):
        return seams.distribute(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    return stock(tensor, device_mesh, placements, src_data_rank=src_data_rank)


def _install_random_factories() -> None:
    """`torch.distributed.tensor.rand` and `randn` would draw from the state of each rank."""
    stock = _api._dtensor_init_helper
    fill = {torch.rand: torch.Tensor.uniform_, torch.randn: torch.Tensor.normal_}

    @functools.wraps(stock)
    def init(init_op: Any, size: torch.Size, *args: Any, requires_grad: bool = False, **kwargs: Any) -> DTensor:
        placements = args[1] if len(args) > 1 else kwargs.get("placements")
        if init_op not in fill or not seams.any_ragged(placements):
            return stock(init_op, size, *args, requires_grad=requires_grad, **kwargs)  # type: ignore[no-any-return]
        empty: DTensor = stock(torch.empty, size, *args, requires_grad=False, **kwargs)
        return fill[init_op](empty).requires_grad_(requires_grad)  # type: ignore[return-value]

    _api._dtensor_init_helper = init


# --- checkpoints


def _install_checkpoint_seams() -> None:
    """DCP's three questions; its default answers would say that every rank holds the whole tensor."""

    def lead(name: str, ours: Callable[..., Any]) -> None:
        stock = getattr(DTensor, name)

        @functools.wraps(stock)
        def method(self: DTensor, *args: Any) -> Any:
            return ours(self, *args) if seams.any_ragged(self.placements) else stock(self, *args)

        setattr(DTensor, name, method)

    lead("__create_write_items__", lambda self, fqn, object: seams.write_items(self, fqn))
    lead("__create_chunk_list__", lambda self: seams.chunk_list(self))
    lead("__get_tensor_shard__", lambda self, index: seams.tensor_shard(self, index))


def _install_staging_seam() -> None:
    """`async_save` takes a DTensor whose shard begins inside a buffer for a plain tensor: its data_ptr() is not 0."""
    try:
        # Private, since torch 2.9; `torch.distributed.checkpoint.async_save` stages through it.
        from torch.distributed.checkpoint import _state_dict_stager
    except ImportError:
        return
    stager = _state_dict_stager.StateDictStager
    stock = stager._offload_tensor

    @functools.wraps(stock)
    def offload(self: Any, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(x, DTensor) or not seams.any_ragged(x.placements):
            return stock(self, x, memo, non_blocking=non_blocking)  # type: ignore[no-any-return, no-untyped-call]
        local = self.deepcopy_with_tensor_offload(local_of(x), memo, non_blocking=non_blocking)
        memo[id(x)] = staged = new_dtensor(local, x._spec, requires_grad=False)
        return staged

    stager._offload_tensor = offload  # type: ignore[method-assign]


def _install_full_state_seam() -> None:
    """Full state dicts broadcast from rank 0 are sliced by one box per rank, which a ragged shard is not."""
    # Private since torch 2.3; `torch.distributed.checkpoint.state_dict` goes through it.
    from torch.distributed import _state_dict_utils

    stock = _state_dict_utils._distribute_tensors

    @functools.wraps(stock)
    def distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        others = []
        for key in keys:
            found = local_state_dict.get(key)
            if isinstance(found, tuple) and seams.any_ragged(found[0].placements):
                local_state_dict[key] = seams.place_full(*found)
            else:
                others.append(key)
        stock(local_state_dict, others, *args, **kwargs)

    _state_dict_utils._distribute_tensors = distribute_tensors


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


def has_torch_order(spec: DTensorSpec) -> bool:
    """Whether shards are nested in an order that only torch's own code reads: strided shards, custom shard orders."""
    if any(isinstance(placement, _StridedShard) for placement in spec.placements):
        return True
    order = getattr(spec, "shard_order", None)
    return order is not None and order != DTensorSpec.compute_default_shard_order(spec.placements)


def with_stride_order(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The tensor with its dims laid out in the order of the spec's strides, as for a transposed parameter."""
    meta = spec.tensor_meta
    if meta is None or local.ndim < 2 or 0 in meta.stride or tuple(meta.stride) == contiguous_stride(meta.shape):
        return local
    order = sorted(range(local.ndim), key=lambda dim: (-meta.stride[dim], dim))
    inverse = sorted(range(local.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(inverse)


def norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, in one fused call, which torch offers under a private name alone."""
    return list(torch._foreach_norm(tensors, order, dtype))


def split(flat: torch.Tensor, numels: Sequence[int]) -> Sequence[torch.Tensor]:
    """`Tensor.split` by sizes, whose Python wrapper is untyped."""
    return torch.functional.split(flat, list(numels))


def current_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The given mesh, or that of the surrounding `with mesh:`."""
    return mesh or _api._mesh_resources.get_current_mesh()
