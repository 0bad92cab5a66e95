"""The placements: RaggedShard cuts leading dims into unequal shares, StridedRaggedShard does so inside TP pieces.

from ragged_dtensor import RaggedShard

RaggedShard((0,), (1, 2, 0, 1))     # whole rows: a quarter, a half, nothing, a quarter
RaggedShard((0, 1), (1, 2, 0, 1))   # any element of a matrix may be the first of a shard
RaggedShard((0, 1), (0, 1, 0, 0))   # the whole matrix on rank 1
RaggedShard((), (0, 1, 0, 0))       # a scalar on rank 1
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import _torch
from ragged_dtensor.errors import LayoutError
from ragged_dtensor.units import Units, units_from_runs


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RaggedShard(Placement):
    """Flatten the leading `dims` and give rank r the share `local_units[r] / sum(local_units)` of them.

    dims: a leading run `(0, ..., k-1)`; `()` for 0-dim tensors, with one owner.
    local_units: one non-negative integer per rank of the mesh axis, reduced by their gcd. Their sum divides the product
        of the sizes of `dims`; a tensor without elements takes any units.

    The local tensor is contiguous and has the shape `(n_local, *shape[len(dims):])`; `n_local` may be 0. Row shares
    (1, 3) of a (4, 2) matrix give the local shapes (1, 2) and (3, 2); flat shares (3, 5) give (3,) and (5,).

    Raises LayoutError.
    """

    dims: tuple[int, ...]
    local_units: Units
    _hash: int = field(init=False)

    def __init__(self, dims: Iterable[int], local_units: Sequence[int]) -> None:
        super().__init__()  # without it the C++ base crashes in is_shard()
        object.__setattr__(self, "dims", _leading_run(dims))
        object.__setattr__(self, "local_units", Units(local_units))
        if not self.dims and self.local_units.owner is None:
            raise LayoutError(
                f"dims=() is for 0-dim tensors, which one rank owns, got local_units={self.local_units.spell()}. "
                "Give exactly one rank a positive unit."
            )
        object.__setattr__(self, "_hash", hash((type(self).__name__, *self._key)))
        _torch.register()

    @property
    def num_flat(self) -> int:
        """How many leading dims are flattened."""
        return len(self.dims)

    @property
    def num_ranks(self) -> int:
        return len(self.local_units)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.dims, self.local_units)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return False
        return self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units.spell()})"

    def __str__(self) -> str:
        return repr(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """How a compiled graph spells a placement that it holds as a constant."""
        return repr(self), {"RaggedShard": RaggedShard, "StridedRaggedShard": StridedRaggedShard, "Units": Units}


@dataclass(frozen=True, init=False, eq=False, repr=False)
class StridedRaggedShard(RaggedShard):
    """A ragged cut inside each piece of a `Shard(0)` on a later mesh axis: FSDP over tensor parallelism.

    Tensor parallelism cuts first, yet its axis stands after the FSDP axis. `split_factor` is the number of pieces that
    exist before this cut: the product of the sizes of the later axes with `Shard(0)`. On a (2, 2) mesh,
    `(StridedRaggedShard((0,), (1, 3), 2), Shard(0))` of 8 rows gives the ranks rows 0 | 4 | 1-3 | 5-7. Units share
    the longest piece, and shorter ones are cut at the same rows: 7 rows are 4 and 3, and give 0 | 4 | 1-3 | 5-6.
    """

    split_factor: int

    def __init__(self, dims: Iterable[int], local_units: Sequence[int], split_factor: int) -> None:
        if not isinstance(split_factor, int) or isinstance(split_factor, bool) or split_factor < 1:
            raise LayoutError(f"split_factor must be a positive integer, got {split_factor!r}.")
        object.__setattr__(self, "split_factor", split_factor)
        super().__init__(dims, local_units)
        if not self.dims:
            raise LayoutError(
                "StridedRaggedShard cuts inside pieces of Shard(0) and needs dims that start at 0, got ()."
            )

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.dims, self.local_units, self.split_factor)

    def __repr__(self) -> str:
        units = self.local_units.spell()
        return f"StridedRaggedShard(dims={self.dims}, local_units={units}, split_factor={self.split_factor})"


def _leading_run(dims: Iterable[int]) -> tuple[int, ...]:
    if isinstance(dims, int):
        raise LayoutError(f"dims must be a tuple of dims, got {dims}. Write ({dims},).")
    run = tuple(operator.index(dim) for dim in dims)
    if run != tuple(range(len(run))):
        raise LayoutError(f"dims must be a leading run (0, 1, ..., k-1), got {run}. Negative dims are not accepted.")
    return run


_torch.seams.is_ragged = lambda placement: isinstance(placement, RaggedShard)
_torch.seams.safe_globals = (RaggedShard, StridedRaggedShard, units_from_runs)
