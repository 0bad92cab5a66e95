"""How the operands of an elementwise op have to lie: the result's placements, and those that each operand must have.

    x     (6, 4)  RaggedShard((0,), (1, 2))
    y     (6, 4)  RaggedShard((0,), (1, 2))      x + y      both are cut alike
    bias  (4,)    Replicate()                    x + bias   a replica broadcasts over dims that are not cut
    mask  (6, 4)  Replicate()                    x * mask   of any other replica each rank takes its slice

Anything else raises an error with the call that makes the operands agree; nothing is gathered silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_dtensor._torch import DTensorSpec
from ragged_dtensor.errors import RaggedShardError, UnsupportedOpError
from ragged_dtensor.op_call import OpCall, Operand, Placements, Where, spec_like, whole_tensor
from ragged_dtensor.placement import RaggedShard, StridedRaggedShard

Shape = tuple[int, ...]


def result_placements(call: OpCall, shape: Shape, operands: Sequence[Operand]) -> Placements:
    """The placements of a result of `shape`: those of the first operand that is cut and not broadcast along the cut."""
    cut = [operand for operand in operands if any(not p.is_replicate() for p in operand.spec.placements)]
    for operand in cut:
        if _keeps_its_cut(operand, shape):
            return tuple(operand.spec.placements)
    if not cut:
        return tuple(operands[0].spec.placements)
    raise _broadcast_along_cut(call, cut[0], shape)


def _keeps_its_cut(operand: Operand, shape: Shape) -> bool:
    """Whether a result of `shape` can be cut as the operand is."""
    if len(operand.shape) != len(shape):
        return False
    for placement in operand.spec.placements:
        if isinstance(placement, RaggedShard) and operand.shape[: placement.num_flat] != shape[: placement.num_flat]:
            return False
        if isinstance(placement, Shard) and operand.shape[placement.dim] != shape[placement.dim]:
            return False
    return True


@dataclass(frozen=True)
class Fit:
    """What brings the operands into line: some are redistributed at no or little cost, replicas are sliced."""

    redistributed: dict[Where, DTensorSpec] = field(default_factory=dict)
    sliced: dict[Where, DTensorSpec] = field(default_factory=dict)

    def __or__(self, other: Fit) -> Fit:
        return Fit(self.redistributed | other.redistributed, self.sliced | other.sliced)


def fit(call: OpCall, result: DTensorSpec, operands: Sequence[Operand]) -> Fit:
    """How the operands come to lie as the result does. Raises where that would gather or move elements."""
    found = Fit()
    for operand in operands:
        if _is_whole(operand):
            if operand.shape and not _broadcasts_locally(operand, result):
                _check_not_written(call, operand, tuple(result.placements))
                found.sliced[operand.where] = result
            continue  # a number stands for itself, whichever mesh torch gave it
        if operand.spec.mesh != result.mesh:
            raise RaggedShardError(
                f"{call.op} got operands on two meshes, {result.mesh} and {operand.spec.mesh}. "
                "Bring them to one mesh: x.full_tensor(), then ragged_dtensor.distribute_tensor(..., mesh, placements)."
            )
        needed = tuple(_needed(call, operand, placement, result) for placement in result.placements)
        if needed == tuple(operand.spec.placements):
            continue
        if not _is_cheap(operand, needed) or not isinstance(operand.where[0], int):
            raise _different_cut(call, operand, needed)
        _check_not_written(call, operand, needed)
        found.redistributed[operand.where] = spec_like(operand.spec, needed, operand.spec.tensor_meta)
    return found


def _is_whole(operand: Operand) -> bool:
    return all(placement.is_replicate() for placement in operand.spec.placements)


def _broadcasts_locally(operand: Operand, result: DTensorSpec) -> bool:
    """Whether a whole operand broadcasts against each local part of the result by itself."""
    shape = tuple(result.shape)
    missing = len(shape) - len(operand.shape)
    for placement in result.placements:
        if isinstance(placement, RaggedShard):
            flat = placement.num_flat
            stretched = operand.shape[: max(0, flat - missing)]
            if any(size != 1 for size in stretched) or len(stretched) > min(flat, 1):
                return False
        elif isinstance(placement, Shard) and placement.dim >= missing and operand.shape[placement.dim - missing] != 1:
            return False
    return True


def _needed(call: OpCall, operand: Operand, placement: Placement, result: DTensorSpec) -> Placement:
    """What an operand that is cut somewhere needs on the mesh axis where the result has `placement`."""
    shape = tuple(result.shape)
    missing = len(shape) - len(operand.shape)
    if isinstance(placement, RaggedShard):
        flat = placement.num_flat
        if not missing and operand.shape[:flat] == shape[:flat]:
            return placement
        stretched = operand.shape[: max(0, flat - missing)]
        if any(size != 1 for size in stretched) or len(stretched) > min(flat, 1):
            raise _broadcast_along_cut(call, operand, shape)
        return Replicate()
    if isinstance(placement, Shard):
        dim = placement.dim - missing
        is_broadcast = dim < 0 or (operand.shape[dim] == 1 and shape[placement.dim] != 1)
        return Replicate() if is_broadcast else Shard(dim)
    return placement


def _is_cheap(operand: Operand, needed: Placements) -> bool:
    """Whether the step is a slice of a replica, another name for the same cut, or the sum that a partial awaits."""
    pairs = zip(operand.spec.placements, needed, strict=True)
    return all(a == b or a.is_replicate() or _is_same_cut(a, b) or _is_awaited(a, b) for a, b in pairs)


def _is_same_cut(placement: Placement, other: Placement) -> bool:
    """Equal shares of equal runs of memory: whole rows and the flat cut between the same rows."""
    if not isinstance(placement, RaggedShard) or type(placement) is not type(other):
        return False
    assert isinstance(other, RaggedShard)
    strides = {p.split_factor for p in (placement, other) if isinstance(p, StridedRaggedShard)}
    return placement.local_units == other.local_units and len(strides) < 2


def _is_awaited(placement: Placement, needed: Placement) -> bool:
    return isinstance(placement, Partial) and needed.is_replicate()


def _check_not_written(call: OpCall, operand: Operand, needed: Placements) -> None:
    """A copy of an operand must not be written in its stead."""
    index = operand.where[0]
    alias = call.op._schema.arguments[index].alias_info if isinstance(index, int) else None
    if alias is not None and alias.is_write:
        raise _different_cut(call, operand, needed)


def check_no_partial(call: OpCall, placements: Placements, operands: Sequence[Operand]) -> None:
    """A sum that is still due must not go through a function of it, unless that is linear."""
    if not any(isinstance(placement, Partial) for placement in placements) or _is_linear(call, placements, operands):
        return
    reduced = ", ".join("Replicate()" if isinstance(p, Partial) else repr(p) for p in placements)
    raise UnsupportedOpError(
        f"{call.op} of a value that is still to be reduced, placed as {list(placements)}, would come before the "
        f"reduction. Reduce first: x.redistribute(placements=[{reduced}])."
    )


# f(a + b) = f(a) + f(b) for these, if all of so many operands are partial alike; plain numbers do not count.
ADDITIVE = {"add": 2, "sub": 2, "neg": 1, "copy": 2, "zero": 1}
# And for these by a factor that is a number or a whole scalar: a tensor factor could be partial, too.
SCALING = {"mul", "div"}


def _is_linear(call: OpCall, placements: Placements, operands: Sequence[Operand]) -> bool:
    name = call.name.removeprefix("_foreach_").removesuffix("_")
    alike = sum(operand.spec.placements == placements for operand in operands)
    if any(isinstance(p, Partial) and p.reduce_op not in ("sum", "avg") for p in placements):
        return name in ("copy", "zero") and alike == ADDITIVE[name]
    if name in ADDITIVE:
        return alike == len(operands) == ADDITIVE[name]
    factors = sum(not operand.shape for operand in operands)
    return name in SCALING and alike == 1 and alike + factors == len(operands)


def _different_cut(call: OpCall, operand: Operand, needed: Placements) -> RaggedShardError:
    spelled = ", ".join(map(repr, needed))
    return RaggedShardError(
        f"{call.op} got operands that are cut differently: argument {_spell(operand.where)} of shape {operand.shape} "
        f"is placed as {list(operand.spec.placements)}, here it has to be placed as {list(needed)}. "
        f"Make them agree: y.redistribute(placements=[{spelled}])."
    )


def _broadcast_along_cut(call: OpCall, operand: Operand, shape: Shape) -> RaggedShardError:
    return RaggedShardError(
        f"{call.op} would broadcast argument {_spell(operand.where)} of shape {operand.shape}, placed as "
        f"{list(operand.spec.placements)}, to {shape} along dims that are cut. "
        f"{whole_tensor(call.ragged.spec)}"
    )


def _spell(where: Where) -> str:
    position, index = where
    return f"{position!r}" if index is None else f"{position!r}[{index}]"
