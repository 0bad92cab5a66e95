"""Ops that treat every element alike: each rank runs the op on its own elements, and nothing moves.

What counts as elementwise is torch's own tag (`torch.Tag.pointwise`), for in-place, out= and foreach forms that of the
functional form, and a short list of ops that lack the tag. Cached answers cost what they cost a stock DTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial

from ragged_dtensor import _torch
from ragged_dtensor._torch import DTensorSpec, OutputSharding, TensorMeta
from ragged_dtensor.agreement import Fit, check_no_partial, fit, result_placements
from ragged_dtensor.errors import RaggedShardError
from ragged_dtensor.op_call import (
    Answer,
    Local,
    OpCall,
    Operand,
    Placements,
    Where,
    num_flat,
    refusal,
    spec_like,
)
from ragged_dtensor.slicing import local_part

aten = torch.ops.aten

# Elementwise, yet without the tag in any of their overloads.
UNTAGGED = {
    "_prelu_kernel",
    "_to_copy",
    "complex",
    "copy",
    "elu_backward",
    "fill",
    "floor_divide",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu",
    "leaky_relu_backward",
    "log_sigmoid_backward",
    "masked_fill",
    "mish_backward",
    "polar",
    "rsub",
    "softplus_backward",
    "softshrink_backward",
    "special_log_ndtr",
    "zero",
}

# Tagged, yet they draw random numbers or look at more than their own element.
NOT_ELEMENTWISE = {"native_dropout_backward.out", "rrelu", "rrelu_", "rrelu_with_noise"}


@functools.cache
def is_elementwise(op: Any) -> bool:
    """Whether the op, or the functional op that it is the in-place or out= form of, treats every element alike."""
    name, _, overload = str(op).partition(".")[2].partition(".")
    if name in NOT_ELEMENTWISE or torch.Tag.nondeterministic_seeded in op.tags or _pretends_to_be_inplace(op):
        return False
    base = name.removesuffix("_")
    return torch.Tag.pointwise in op.tags or base in UNTAGGED or _has_tagged_form(op, base, overload)


def _pretends_to_be_inplace(op: Any) -> bool:
    """Such as `aten::__lshift__`: torch takes its name for that of an in-place op and returns the operand unchanged."""
    return op._schema.name.endswith("_") and not op._schema.is_mutable


def _has_tagged_form(op: Any, name: str, overload: str) -> bool:
    """Whether another form of the op carries the tag. `max` has elementwise forms and reductions: both must fit."""
    packet = getattr(aten, name, None)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return False
    tensors = _num_tensors(op)
    for other in overloads_of(packet):
        if torch.Tag.pointwise in other.tags and _num_tensors(other) == tensors and _shares_dims(op, other):
            return True
    return False


def overloads_of(packet: Any) -> list[Any]:
    return [getattr(packet, overload) for overload in packet.overloads()]


def _num_tensors(op: Any) -> int:
    return sum("Tensor" in str(argument.type) for argument in op._schema.arguments if not argument.is_out)


def _shares_dims(op: Any, other: Any) -> bool:
    """Whether both take the same kind of reduction arguments, that is, none."""
    names = {argument.name for schema in (op._schema, other._schema) for argument in schema.arguments}
    return not names & {"dim", "dims", "keepdim"} and _num_tensors(op) > 0


def elementwise(call: OpCall) -> Answer:
    """One op on one or more tensors."""
    check_memory_format(call)
    metas = call.metas
    inputs = [operand for operand in call.operands if not operand.is_output]
    placements = result_placements(call, tuple(metas[0].shape), inputs)
    check_no_partial(call, placements, inputs)
    _check_outputs(call, placements, metas)
    specs = [spec_like(call.ragged.spec, placements, meta) for meta in metas]
    found = fit(call, specs[0], inputs)
    spec = specs[0] if len(specs) == 1 else tuple(specs)
    if num_flat_or_none(placements) == 0:
        return Local(spec, functools.partial(_on_owner, call.op))
    return fitted(call, spec, found)


def fitted(call: OpCall, spec: Any, found: Fit) -> Answer:
    """The op itself on the local tensors, once its operands are in line."""
    schema = call.with_operand_specs(found.redistributed) if found.redistributed else None
    if found.sliced:
        return Local(spec, functools.partial(on_slices, call.op, found.sliced), schema)
    if schema is not None:
        return OutputSharding(spec, redistribute_schema=schema, needs_redistribute=True)
    return OutputSharding(spec)


def on_slices(op: Any, sliced: dict[Where, DTensorSpec], /, *args: Any, **kwargs: Any) -> Any:
    """The op with this rank's slices in place of whole operands, which are stretched to the result's shape first."""
    positional: list[Any] = list(args)
    for (position, index), spec in sliced.items():
        holder: Any = positional if isinstance(position, int) else kwargs
        if index is None:
            holder[position] = _slice(holder[position], spec)
        else:
            holder[position] = [*holder[position]]
            holder[position][index] = _slice(holder[position][index], spec)
    return op(*positional, **kwargs)


def _slice(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    return local_part(full.expand(tuple(spec.shape)), spec.mesh, tuple(spec.placements))


def num_flat_or_none(placements: Placements) -> int | None:
    return num_flat(placements) if any(_torch.seams.is_ragged(placement) for placement in placements) else None


def _check_outputs(call: OpCall, placements: Placements, metas: Sequence[TensorMeta]) -> None:
    outputs = [operand for operand in call.operands if operand.is_output]
    if call.is_inplace:
        outputs.append(next(operand for operand in call.operands if operand.where == (0, None)))
    for output, meta in zip(outputs, metas, strict=False):
        if output.shape != tuple(meta.shape) or output.spec.placements != placements:
            raise RaggedShardError(
                f"{call.op} writes a result of shape {tuple(meta.shape)} placed as {list(placements)} into a tensor of "
                f"shape {output.shape} placed as {list(output.spec.placements)}. Both must agree: "
                f"redistribute the operands to {list(output.spec.placements)}, or do not write in place."
            )


def check_memory_format(call: OpCall) -> None:
    """A local tensor has fewer dims than the full one; channels_last means nothing to it."""
    memory_format = call.argument("memory_format")
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise refusal(call, f"memory_format={memory_format}", "Ragged tensors are contiguous: leave the argument out.")


def _on_owner(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A 0-dim ragged tensor has a local tensor of one element or none; type promotion needs it as a 0-dim tensor.

    Ranks without it run the op on ones: only the arguments tell the dtype, for torch keeps one answer for 2.5 and for a
    0-dim tensor of float64, which promote differently.
    """
    leaves = _torch.tree_leaves((args, kwargs))
    is_owner = all(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
    args, kwargs = _torch.tree_map_only(torch.Tensor, _as_number, (args, kwargs))
    result = op(*args, **kwargs)
    return _torch.tree_map_only(torch.Tensor, lambda leaf: leaf.view(1) if is_owner else leaf.new_empty(0), result)


def _as_number(local: torch.Tensor) -> torch.Tensor:
    return local.view(()) if local.numel() else local.new_ones(())


# --- lists of tensors


@functools.cache
def is_elementwise_on_lists(op: Any) -> bool:
    """`_foreach_x` is as local as x; the fused optimizers are elementwise by construction."""
    name = op._schema.name.partition("::")[2]
    if name.startswith("_fused_"):
        return name.removesuffix("_") in FUSED_OPTIMIZERS
    if not name.startswith("_foreach_"):
        return False
    base = name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(aten, base, None)
    if base in UNTAGGED or base == "clone":
        return True
    if not isinstance(packet, _torch.OpOverloadPacket) or base in ("max", "min", "norm"):
        return False
    return any(torch.Tag.pointwise in form.tags for form in overloads_of(packet))


FUSED_OPTIMIZERS = {"_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"}


def elementwise_on_lists(call: OpCall) -> Answer:
    """One op on lists of tensors: the i-th tensors of all lists and the single tensors belong together."""
    if call.output_names:
        raise refusal(call, "torch does not take lists of DTensors as out=", "Use the in-place form.")
    found, specs = Fit(), []
    for operands in _columns(call):
        first = operands[0].spec
        placements = result_placements(call, tuple(first.shape), operands)
        check_no_partial(call, placements, operands)
        _check_promotion(call, placements, operands)
        if call.op._schema.is_mutable and placements != first.placements:
            raise refusal(call, "the first list would change its placement")
        specs.append(spec_like(first, placements, first.tensor_meta))
        found |= fit(call, specs[-1], operands)
    if not call.op._schema.returns:
        return fitted(call, None, found)
    return _list_results(call, specs, found)


def _check_promotion(call: OpCall, placements: Placements, operands: Sequence[Operand]) -> None:
    """Locally a 0-dim ragged tensor has one dim, which would weigh more in type promotion."""
    dtypes = {operand.dtype for operand in operands}
    if num_flat_or_none(placements) == 0 and len(dtypes) > 1 and call.op._schema.returns:
        raise refusal(
            call, f"0-dim ragged tensors of dtypes {dtypes} in one list op", "Convert them to one dtype first."
        )


def _columns(call: OpCall) -> list[list[Operand]]:
    lists: dict[int | str, list[Operand]] = {}
    singles: list[Operand] = []
    for operand in call.operands:
        if operand.where[1] is None:
            singles.append(operand)
        else:
            lists.setdefault(operand.where[0], []).append(operand)
    if len({len(items) for items in lists.values()}) > 1:
        raise refusal(call, "its lists mix tensors with other values or differ in length")
    return [[*column, *singles] for column in zip(*lists.values(), strict=True)]


def _list_results(call: OpCall, specs: Sequence[DTensorSpec], found: Fit) -> Answer:
    if len(call.op._schema.returns) == 1:
        results = [spec_like(spec, spec.placements, meta) for spec, meta in zip(specs, call.metas, strict=True)]
        answer = fitted(call, results, found)
        if isinstance(answer, OutputSharding) and not all(operand.dtype.is_floating_point for operand in call.operands):
            # Torch's cache does not tell [x] * 2 from [x] * 2.5, which have different dtypes for whole numbers.
            return Local(results, call.op, answer.redistribute_schema)
        return answer
    if found.redistributed or found.sliced:
        raise refusal(call, "operands are placed differently")
    # A functional fused optimizer (torch.compile makes them) returns its lists of operands, updated.
    lists = [argument for argument in call.schema.args_schema if isinstance(argument, list | tuple)]
    return Local(tuple(list(specs) for specs in lists[: len(call.op._schema.returns)]), call.op)


# --- the same tensor again


def same_layout(call: OpCall) -> Answer:
    """Aliases, detached and cloned tensors, and new tensors of the same shape: any placement, even a partial one."""
    check_memory_format(call)
    if any(isinstance(placement, Partial) for placement in call.spec.placements) and call.name.endswith("_like"):
        raise refusal(call, "a new tensor would still be due for reduction")
    return OutputSharding(spec_like(call.spec, call.spec.placements, call.metas[0]))


SAME_LAYOUT = {
    "alias",
    "clone",
    "detach",
    "empty_like",
    "full_like",
    "lift_fresh",
    "ones_like",
    "zeros_like",
}
