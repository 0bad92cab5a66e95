"""Which ops a ragged tensor takes: one rule per kind of op, and an error for everything else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ragged_dtensor import _torch
from ragged_dtensor._torch import OutputSharding
from ragged_dtensor.along_dim import ALONG_ONE_DIM, along_dim
from ragged_dtensor.elementwise import (
    SAME_LAYOUT,
    elementwise,
    elementwise_on_lists,
    is_elementwise,
    is_elementwise_on_lists,
    same_layout,
)
from ragged_dtensor.new_tensor import NEW_TENSOR, new_tensor
from ragged_dtensor.op_call import Answer, Local, OpCall, is_participating, refusal
from ragged_dtensor.op_seams import CachedLocal
from ragged_dtensor.random import RANDOM, random
from ragged_dtensor.reductions import FOREACH_REDUCTIONS, REDUCTIONS, reduced, reduced_lists
from ragged_dtensor.views import RESHAPES, UNCHANGED, expanded, reshaped, unchanged
from ragged_dtensor.whole import WHOLE

Rule = Callable[[OpCall], Answer]

RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME_LAYOUT, same_layout),
    **dict.fromkeys(NEW_TENSOR, new_tensor),
    **dict.fromkeys(RESHAPES, reshaped),
    **dict.fromkeys(UNCHANGED, unchanged),
    **dict.fromkeys(REDUCTIONS, reduced),
    **dict.fromkeys(FOREACH_REDUCTIONS, reduced_lists),
    **dict.fromkeys(RANDOM, random),
    **dict.fromkeys(ALONG_ONE_DIM, along_dim),
    "expand": expanded,
}


def rule_for(call: OpCall) -> Rule | None:
    """The rule that answers the op, if there is one."""
    if is_elementwise_on_lists(call.op):
        return elementwise_on_lists
    if is_elementwise(call.op):
        return same_layout if call.name == "clone" and not call.output_names else elementwise
    if call.output_names and call.name in RULES:
        raise refusal(call, "out= is only supported for elementwise ops", "Assign the result instead.")
    return RULES.get(call.name)


def answer(op: Any, args: tuple[object, ...], kwargs: dict[str, object], op_info: Any) -> Any:
    """What torch gets for an op of which at least one operand is ragged: a sharding, which it caches, or the result."""
    call = OpCall(op, args, kwargs, op_info)
    if call.name in WHOLE:
        if call.op._overloadname != "default":
            raise refusal(call)
        return WHOLE[call.name](call)
    rule = rule_for(call)
    if rule is None:
        result = _torch.decompose(op, args, kwargs)
        if result is NotImplemented:
            raise refusal(call)
        return result
    found = _answers.of(call, rule)
    if isinstance(found, Local):
        return _cached(call, found) if _is_repeatable(call, found, rule) else _run_local(call, found)
    if _may_be_cached(call, rule):
        return found
    return _torch.run(op, args, kwargs, op_info, found)


class Answers:
    """Answers by what they depend on: each costs a run of the op on fake tensors, and torch does not cache all of them.

    They keep their mesh, and meshes compare equal across process groups that were destroyed and made anew, so that a
    new default group starts with none. At most `MOST` are kept, the oldest go first.
    """

    MOST = 4096

    def __init__(self) -> None:
        self._found: dict[Any, Answer] = {}
        self._world: Callable[[], object] = lambda: None

    def of(self, call: OpCall, rule: Rule) -> Answer:
        if _torch.is_tracing() or call.key is None:  # a trace has fake shapes
            return rule(call)
        self._forget_other_worlds()
        found = self._found.get(call.key)
        if found is None:
            if len(self._found) >= self.MOST:
                self._found.pop(next(iter(self._found)))
            found = self._found[call.key] = rule(call)
        return found

    def _forget_other_worlds(self) -> None:
        world = dist.group.WORLD
        if world is not self._world():
            self._found.clear()
            self._world = reference_to(world)


def reference_to(world: object) -> Callable[[], object]:
    return weakref.ref(world) if world is not None else lambda: None


_answers = Answers()


def _may_be_cached(call: OpCall, rule: Rule) -> bool:
    """Whether torch's cache tells all calls apart whose answers differ: numbers may decide dtypes, dims and sizes."""
    if any(operand.where[1] is not None for operand in call.operands) and not _torch.tells_lists_apart(call.op):
        return False
    tensors = {operand.where[0] for operand in call.operands}
    numbers = [i for i in range(len(call.schema.args_schema)) if i not in tensors]
    is_elementwise_rule = rule in (elementwise, elementwise_on_lists, same_layout)
    if call.is_inplace or (is_elementwise_rule and not (numbers or set(call.schema.kwargs_schema) - tensors)):
        return True
    hashed = _torch.first_hashed_argument(call.op)
    if hashed is None:
        return False
    are_hashed = hashed <= min(numbers, default=hashed)
    if is_elementwise_rule:
        is_floating = all(operand.dtype.is_floating_point for operand in call.operands)
        return rule is same_layout or is_floating or are_hashed
    keywords = {argument.name for argument in call.op._schema.arguments if argument.kwarg_only}
    return are_hashed and keywords <= _torch.hashed_keywords(call.op)


def _is_repeatable(call: OpCall, found: Local, rule: Rule) -> bool:
    """Whether torch may keep a local computation and run it again, on other tensors that are placed alike."""
    if rule not in REPEATABLE or found.redistributed is not None or _torch.is_tracing():
        return False
    return not call.op._schema.is_mutable and not call.output_names and _may_be_cached(call, rule)


REPEATABLE: tuple[Rule, ...] = (along_dim, elementwise, reduced, reduced_lists)


def _cached(call: OpCall, found: Local) -> CachedLocal:
    return CachedLocal(
        found.spec, call.schema, needs_redistribute=True, compute=found.compute, world=reference_to(dist.group.WORLD)
    )


def _run_local(call: OpCall, found: Local) -> Any:
    if not is_participating(call.mesh):
        return OutputSharding(found.spec)
    if found.redistributed is not None:
        _torch.redistribute_arguments(call.info, found.redistributed)
    args, kwargs = _torch.local_arguments(call.info)
    result = found.compute(*args, **kwargs)
    if call.is_inplace:
        return call.args[0]
    if outputs := [call.kwargs[name] for name in call.output_names]:
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    return _torch.wrap(call.op, call.args, call.kwargs, result, found.spec)


_torch.seams.answer = answer
