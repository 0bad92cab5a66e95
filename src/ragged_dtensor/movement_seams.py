"""Where ragged tensors move, are made and are taken apart: redistribute, distribute_tensor, from_local, to_local.

Each function asks `seams` whether a placement is ragged and leaves everything else to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from ragged_dtensor import _torch
from ragged_dtensor._torch import DTensorSpec, seams
from ragged_dtensor.errors import RaggedShardError, UnsupportedTransitionError


def install() -> None:
    _torch.REDISTRIBUTE.replace(_redistribute)
    _torch.REDISTRIBUTE_LOCAL.replace_everywhere(_redistribute_local)
    _torch.REDISTRIBUTE_BACKWARD.replace(_gradient_of_redistribute)
    _torch.TO_LOCAL_BACKWARD.replace(_gradient_of_to_local)
    _torch.GLOBAL_SHAPE.replace(_global_shape)
    _torch.LOCAL_SHAPE.replace_everywhere(_local_shape)
    _torch.RANDOM_FACTORY.replace(_random_factory)
    _torch.replace_distribute_tensor(_lead, seams=seams)


# --- redistribute


def _redistribute(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Torch refuses Partial as a target by a RuntimeError about one axis."""

    def redistribute(
        self: DTensor, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        if placements is not None and seams.any_ragged((*self.placements, *placements)):
            _check_target(tuple(self.placements), tuple(placements))
        return stock(self, device_mesh, placements, **options)  # type: ignore[no-any-return]

    return redistribute


def _check_target(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> None:
    for now, wanted in zip(source, target, strict=False):
        if wanted.is_partial() and now != wanted:
            raise UnsupportedTransitionError(
                f"There is no way from {source} to {target}: nothing can be moved to {wanted!r}, which only ops "
                "and from_local make. Redistribute to Replicate() or to a shard."
            )


def _redistribute_local(stock: Callable[..., Any]) -> Callable[..., Any]:
    def redistribute_local_tensor(
        local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        if seams.any_ragged(current_spec.placements) or seams.any_ragged(target_spec.placements):
            async_op = options.get("async_op", False)
            return seams.redistribute(local_tensor, current_spec, target_spec, async_op=async_op)
        return stock(local_tensor, current_spec, target_spec, **options)  # type: ignore[no-any-return]

    return redistribute_local_tensor


def _gradient_of_redistribute(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of Partial -> Ragged is Replicate, as torch has it for Partial -> Shard."""

    def backward(ctx: Any, grad_output: DTensor) -> Any:
        spec = ctx.current_spec
        pairs = zip(grad_output.placements, spec.placements, strict=True)
        placements = tuple(
            Replicate() if seams.is_ragged(grad) and source.is_partial() else source for grad, source in pairs
        )
        if placements != spec.placements:
            ctx.current_spec = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        return stock(ctx, grad_output)

    return backward


# --- local tensors


def _gradient_of_to_local(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A local gradient becomes a DTensor of the full tensor's shape and stride, which a flat cut cannot tell."""

    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[DTensor | None, None]:
        spec = ctx.dtensor_spec
        if grad_output is None or not seams.any_ragged((*spec.placements, *(ctx.grad_placements or ()))):
            return stock(ctx, grad_output)  # type: ignore[no-any-return]
        placements = ctx.grad_placements or [Replicate() if p.is_partial() else p for p in spec.placements]
        shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
        return DTensor.from_local(grad_output.contiguous(), spec.mesh, placements, shape=shape, stride=stride), None

    return backward


def _global_shape(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`DTensor.from_local` without a shape asks C++, which refuses an unknown placement."""

    def compute_global_tensor_info(
        tensor: torch.Tensor, mesh: Any, placements: Sequence[Placement]
    ) -> tuple[list[int], list[int]]:
        if not seams.any_ragged(placements):
            return stock(tensor, mesh, placements)  # type: ignore[no-any-return]
        shape = seams.global_shape(tensor, mesh, placements)
        return list(shape), list(_torch.contiguous_stride(shape))

    return compute_global_tensor_info


def _local_shape(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Factories, loaders and checkpoints ask for a box per rank and would take a ragged shard for a replica."""

    def compute(
        global_shape: Any,
        mesh_shape: Any,
        my_coordinate: Any,
        placements: Sequence[Placement],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not seams.any_ragged(placements):
            return stock(global_shape, mesh_shape, my_coordinate, placements, *args, **kwargs)  # type: ignore[no-any-return]
        if not (args[0] if args else kwargs.get("skip_offset", False)):
            raise RaggedShardError(
                f"A shard of {tuple(placements)} is not one box of the full tensor, so it has no single offset. "
                "Ask ragged_dtensor.ownership.piece_of(...).boxes(), or redistribute first."
            )
        lookup = my_coordinate.__getitem__ if isinstance(my_coordinate, list | tuple) else my_coordinate
        coordinate = [lookup(axis) for axis in range(len(placements))]
        return seams.local_shape(tuple(global_shape), placements, tuple(mesh_shape), coordinate), ()

    return compute


# --- new tensors


def _random_factory(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.tensor.rand` and `randn` would draw from the state of each rank."""
    fill = {torch.rand: torch.Tensor.uniform_, torch.randn: torch.Tensor.normal_}

    def init(init_op: Any, size: torch.Size, *args: Any, requires_grad: bool = False, **kwargs: Any) -> DTensor:
        placements = args[1] if len(args) > 1 else kwargs.get("placements")
        if init_op not in fill or not seams.any_ragged(placements):
            return stock(init_op, size, *args, requires_grad=requires_grad, **kwargs)  # type: ignore[no-any-return]
        empty: DTensor = stock(torch.empty, size, *args, requires_grad=False, **kwargs)
        return fill[init_op](empty).requires_grad_(requires_grad)  # type: ignore[return-value]

    return init


def _lead(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
) -> Any:  # pragma: no cover - only its code is used, with the globals of torch's module
    ours = _ragged_dtensor  # type: ignore[name-defined]  # noqa: F821
    if ours["seams"].any_ragged(placements):
        return ours["seams"].distribute(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    return ours["stock"](tensor, device_mesh, placements, src_data_rank=src_data_rank)


seams.installers.append(install)
