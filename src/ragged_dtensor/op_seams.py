"""Where ops on ragged tensors leave torch's way: shardings that C++ does not know, ops that torch handles itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ragged_dtensor import _torch
from ragged_dtensor._torch import OutputSharding, seams

# These two look at the shape or at the local memory alone and are right for any placement.
SAFE_HANDLERS = {torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default}


@dataclass(kw_only=True)
class CachedLocal(OutputSharding):
    """A sharding that torch caches, of which `compute` instead of the op makes the local results.

    Torch asks Python for the local results of a sharding that needs a redistribution, which this one pretends. `world`
    leads to the default process group for which `compute`, which may hold a mesh, was made.
    """

    compute: Callable[..., Any]
    world: Callable[[], object]


def install() -> None:
    _torch.PROPAGATE.replace(_propagation)
    _torch.LOCAL_RESULTS.replace(_local_results)
    handlers = _torch.custom_handlers()
    for op, stock in handlers.items():
        if op not in SAFE_HANDLERS:
            handlers[op] = _guarded(stock)
    for op, names in HASHED.items():
        _torch.hash_keywords(op, names)


def _propagation(stock: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(op: Any, args: tuple[object, ...], kwargs: dict[str, object], op_info: Any, try_cache: bool) -> Any:
        if _has_ragged_operand(op_info):
            return seams.answer(op, args, kwargs, op_info)
        return stock(op, args, kwargs, op_info, try_cache)

    return propagate


def _has_ragged_operand(op_info: Any) -> bool:
    return any(seams.any_ragged(spec.placements) for spec in _torch.specs_of(op_info.schema))


def _local_results(stock: Callable[..., Any]) -> Callable[..., Any]:
    def local_results(op: Any, args: tuple[object, ...], op_info: Any) -> Any:
        found = op_info.output_sharding
        if not isinstance(found, CachedLocal) or op_info.compute_mesh.get_coordinate() is None:
            return stock(op, args, op_info)
        local, kwargs = _torch.local_arguments(op_info)
        if found.world() is not dist.group.WORLD:
            # Meshes of equal ranks compare equal across process groups, so that torch finds the answer of an old one.
            found = seams.answer(op, args, kwargs, _torch.info_of(op, args, kwargs))
        return found.compute(*local, **kwargs)

    return local_results


def _guarded(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of torch's, asked before any sharding, that leaves ragged operands to us."""

    @functools.wraps(stock)
    def handle(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        op_info = _torch.info_of(op, args, kwargs)
        if not _has_ragged_operand(op_info):
            return stock(op, args, kwargs)
        result = seams.answer(op, args, kwargs, op_info)
        return _torch.run(op, args, kwargs, op_info, result) if isinstance(result, OutputSharding) else result

    return handle


aten = torch.ops.aten

# Keywords on which a cached answer depends, though torch's cache does not look at them.
HASHED: dict[Any, tuple[str, ...]] = {
    aten._to_copy.default: ("memory_format",),
    aten.clone.default: ("memory_format",),
    aten.empty_like.default: ("memory_format",),
    aten.full_like.default: ("memory_format",),
    aten.ones_like.default: ("memory_format",),
    aten.zeros_like.default: ("memory_format",),
    aten.linalg_vector_norm.default: ("dtype",),
    aten.mean.default: ("dtype",),
    aten.mean.dim: ("dtype",),
    aten.prod.default: ("dtype",),
    aten.prod.dim_int: ("dtype",),
    aten.sum.default: ("dtype",),
    aten.sum.dim_IntList: ("dtype",),
}

seams.installers.append(install)
