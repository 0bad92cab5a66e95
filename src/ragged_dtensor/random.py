"""Random values that do not depend on the sharding: a ragged tensor gets those that the unsharded tensor would get.

Every rank draws the whole tensor's stream from its own generator, which must be in the same state on every rank, keeps
its part, and leaves the generator where the unsharded call would. On the CPU, normal and uniform values come in chunks,
so that no rank ever holds the whole tensor; everything else draws one whole tensor at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from ragged_dtensor import _torch
from ragged_dtensor._torch import DTensorSpec
from ragged_dtensor.errors import RaggedShardError
from ragged_dtensor.layout import Piece
from ragged_dtensor.op_call import Answer, Local, OpCall, refusal, spec_like
from ragged_dtensor.ownership import local_piece
from ragged_dtensor.slicing import local_part, part_of

Draw = Callable[[torch.Tensor], object]

# Elements drawn at a time. A multiple of 16: torch makes normal values in blocks of 16.
CHUNK = 1 << 20
BLOCK = 16


def init_full(tensor: torch.Tensor, fn: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Initialise a sharded tensor as `fn` initialises the unsharded one, and return it.

    For initialisers that look at a whole matrix: `init_full(weight, torch.nn.init.orthogonal_)`. `fn` gets a full
    tensor and writes all of it in place; each rank keeps its part. Plain tensors are handed to `fn` as they are.

    Raises RaggedShardError if `fn` leaves elements unwritten.
    """
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            fn(tensor)
            return tensor
        spec, local = tensor._spec, tensor.to_local()
        if local.is_meta:
            return tensor
        full = _whole(spec, local)
        if full.dtype.is_floating_point:
            full.fill_(math.nan)
        fn(full)
        if full.dtype.is_floating_point and bool(full.isnan().any()):
            raise RaggedShardError(
                f"{fn} left elements of the full tensor of shape {tuple(full.shape)} unwritten (or wrote NaN); "
                "init_full does not know their old values. Initialise all elements, or gather with full_tensor() first."
            )
        part = local_part(full, tensor.device_mesh, tuple(tensor.placements)).contiguous()
        tensor.copy_(_torch.new_dtensor(part, spec, requires_grad=False))
    return tensor


def _whole(spec: DTensorSpec, local: torch.Tensor) -> torch.Tensor:
    assert spec.tensor_meta is not None
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.tensor_meta.dtype, device=local.device)


# --- the rules

INPLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}

# Ops that return a new tensor, with what fills it in place.
FILLING: dict[str, Callable[..., object]] = {
    "rand_like": torch.Tensor.uniform_,
    "randn_like": torch.Tensor.normal_,
    "randint_like": lambda tensor, *bounds, **options: tensor.random_(*((0, *bounds)[-2:]), **options),
    "bernoulli": torch.Tensor.bernoulli_,
    "uniform": torch.Tensor.uniform_,
    "normal_functional": torch.Tensor.normal_,
}


def random(call: OpCall) -> Answer:
    """Fill in place, or a new tensor of the same layout, with the whole tensor's random values."""
    if any(isinstance(placement, Partial) for placement in call.spec.placements):
        raise refusal(call, "random parts do not add up to random values")
    if len(call.operands) > 1 or str(call.op) == "aten.bernoulli.default":
        raise refusal(call, "probabilities or bounds that are tensors", "Pass a number, or use init_full.")
    device = call.argument("device")
    if device is not None and torch.device(device).type != call.mesh.device_type:
        raise refusal(call, f"values on {device}", "Draw them on the tensor's own device, then move them.")
    if call.is_inplace:
        return Local(call.spec, functools.partial(_fill, call.spec, call.op))
    spec = spec_like(call.spec, call.spec.placements, call.metas[0])
    return Local(spec, functools.partial(_filled, spec, FILLING[call.name]))


RANDOM = INPLACE | set(FILLING)


def _filled(
    spec: DTensorSpec, op: Callable[..., object], local: torch.Tensor, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    generator = {"generator": kwargs["generator"]} if kwargs.get("generator") is not None else {}
    assert spec.tensor_meta is not None
    return _fill(spec, op, torch.empty_like(local, dtype=spec.tensor_meta.dtype), *args, **generator)


def _fill(
    spec: DTensorSpec, op: Callable[..., object], local: torch.Tensor, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if local.is_meta:
        return local

    def draw(tensor: torch.Tensor) -> None:
        op(tensor, *args, **kwargs)

    piece = local_piece(tuple(spec.shape), spec.placements, spec.mesh)
    if _comes_in_chunks(spec, op, piece, local):
        _draw_chunks(draw, math.prod(spec.shape), _flat_begin(piece), local)
    else:
        full = _whole(spec, local)
        draw(full)
        local.copy_(part_of(full, piece))
    return local


def _comes_in_chunks(spec: DTensorSpec, op: Callable[..., object], piece: Piece, local: torch.Tensor) -> bool:
    """Whether drawing chunk by chunk gives the same values, and this rank's part is one run of them."""
    is_streamed = op in STREAMED and local.device.type == "cpu" and not _torch.is_tracing()
    is_run = piece.num_flat is not None and piece.sizes == tuple(spec.shape)
    is_in_order = tuple(spec.stride) == _torch.contiguous_stride(spec.shape)
    return is_streamed and is_run and is_in_order and math.prod(spec.shape) > CHUNK and local.is_contiguous()


STREAMED = {
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
}


def _flat_begin(piece: Piece) -> int:
    assert piece.num_flat is not None
    return piece.begin * math.prod(piece.sizes[piece.num_flat :])


def _draw_chunks(draw: Draw, numel: int, begin: int, local: torch.Tensor) -> None:
    """Draw `numel` values, chunk by chunk, and keep those from `begin` on that fit into `local`."""
    kept, end = local.view(-1), begin + local.numel()
    chunk = local.new_empty(CHUNK + BLOCK)
    position = 0
    while position < numel:
        size = min(CHUNK, numel - position)
        if numel - position - size < BLOCK:  # the last block is drawn twice unless it is whole: keep it in one chunk
            size = numel - position
        draw(chunk[:size])
        first, last = max(position, begin), min(position + size, end)
        if first < last:
            kept[first - begin : last - begin] = chunk[first - position : last - position]
        position += size
