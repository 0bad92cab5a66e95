"""Where a parameter's shards live: on the data axes, beside the axes on which another parallelism cut it first.

    the parameter, before    data mesh      its shards
    plain                    (dp)           RaggedShard
    Shard(0) on (tp)         (dp)           StridedRaggedShard, Shard(0)     on (dp, tp)
    Shard(1) on (tp)         (dp)           RaggedShard, Shard(1)
    Replicate on (tp)        (rep, dp)      Replicate, RaggedShard, Replicate

Tensor and expert parallelism cut first: the planner sees the part that their rank holds, and a ragged cut is taken
inside it. Their axes come last in the mesh all the same, as in FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ragged_dtensor import RaggedShard, StridedRaggedShard
from ragged_dtensor.ownership import piece_of

from . import _torch
from .errors import VescaleError
from .layout import Layout
from .mesh import DataMesh

__all__ = ["Home", "local_shape", "ragged_shard"]


@dataclass(frozen=True, eq=False)
class Home:
    """`around` are the placements on `mesh`, Replicate at `axis`, where the ragged one goes (None: no axis shards).

    shape: of this rank's part, which the ranks of the data mesh share; of a plain parameter, its own shape.
    largest: of the part on the rank that has most. Plans are made from it, so that they are the same on all ranks.
    given: what the parameter was as a DTensor before, and is again while it is unsharded; None for a plain one.
    data_axes: axes of `given` that are data axes, where gradients are still to be reduced.
    """

    mesh: DeviceMesh
    around: tuple[Placement, ...]
    axis: int | None
    shape: torch.Size
    largest: tuple[int, ...]
    given: _torch.DTensorSpec | None = None
    data_axes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, fqn: str, param: torch.Tensor, data: DataMesh) -> Home:
        """Raises VescaleError, naming the parameter, if its mesh and the data mesh do not fit together."""
        if data.spmd is not None:
            return _on_named_axes(fqn, param, data)
        if isinstance(param, DTensor):
            return _beside_other_axes(fqn, param, data)
        around = (Replicate(),) * data.mesh.ndim
        return cls(data.mesh, around, data.shard_axis, param.shape, tuple(param.shape))

    @property
    def is_uneven(self) -> bool:
        """Whether some rank of the other parallelism holds less than another."""
        return not self._parts_are_equal(first_dim=0)

    @property
    def stride(self) -> int:
        """Elements that no cut may fall inside, so that the same cut fits every rank of the other parallelism.

        One step along the dim that `Shard(d)`, d > 0, left on this rank; everything where it left unequal parts. Those
        of a later `Shard(0)` are cut at the same rows, as StridedRaggedShard says.
        """
        fits_all = not self.is_uneven or (self._later_pieces and self._parts_are_equal(first_dim=1))
        return max(math.prod(self.largest[self._max_flat :] if fits_all else self.largest), 1)

    def ragged(self, layout: Layout, index: int) -> RaggedShard:
        """The placement of tensor `index`, the same on every rank."""
        shard = ragged_shard(layout, index, self.largest, self._max_flat)
        if self._is_opaque:
            return shard
        pieces = self._later_pieces
        if not pieces:
            return shard
        return StridedRaggedShard(shard.dims, shard.local_units, math.prod(pieces))

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Of the sharded parameter, its gradient and its optimizer state."""
        return tuple(shard if axis == self.axis else each for axis, each in enumerate(self.around))

    def local_shape(self, shard: RaggedShard, numel: int) -> tuple[int, ...]:
        """Of this rank's shard, which has `numel` elements."""
        if self.given is None or self._is_opaque:
            return local_shape(shard, self.shape, numel)
        if self.axis is None:
            return tuple(self.shape)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        found = piece_of(
            tuple(self.given.shape), self.placements(shard), tuple(self.mesh.shape), tuple(coordinate)
        ).local_shape
        assert math.prod(found) == numel, (found, numel)
        return found

    def unsharded(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter as forward uses it, a view of the gathered elements."""
        view = flat.view(self.shape)
        return view if self.given is None else _torch.dtensor(view, _torch.with_dtype(self.given, view.dtype))

    def local_gradient(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the data axes have to reduce of `grad`, autograd's for the unsharded parameter.

        A gradient that its other axes have yet to sum, as that of a norm under sequence parallelism, is summed there
        once, in `dtype`.
        """
        if self.given is None:
            return grad
        if not isinstance(grad, DTensor):
            raise VescaleError(f"expected a DTensor as the gradient of a DTensor, got {type(grad).__name__}")
        wanted = tuple(
            grad.placements[axis] if axis in self.data_axes else placement
            for axis, placement in enumerate(self.given.placements)
        )
        if grad.placements != wanted:
            local = _torch.finished(_torch.local_of(grad)).to(dtype)
            grad = _torch.dtensor(local, _torch.with_dtype(_torch.spec_of(grad), dtype))
            grad = grad.redistribute(placements=wanted)
        return _torch.finished(_torch.local_of(grad))

    def _parts_are_equal(self, *, first_dim: int) -> bool:
        """Whether all ranks of the other parallelism hold the same sizes along the dims from `first_dim` on."""
        if self.given is None or self._is_opaque:
            return True
        shards = [axis for axis, each in enumerate(self.around) if isinstance(each, Shard) and each.dim >= first_dim]
        num_parts = math.prod(self.mesh.size(axis) for axis in shards)
        return math.prod(self.given.shape[first_dim:]) == num_parts * math.prod(self.largest[first_dim:])

    @property
    def _max_flat(self) -> int:
        """How many leading dims a cut may flatten: it stays off those that another axis cuts, but for the first."""
        if self._is_opaque:
            return len(self.largest)
        dims = [each.dim for each in self.around if isinstance(each, Shard) and each.dim > 0]
        return min(dims, default=len(self.largest))

    @property
    def _is_opaque(self) -> bool:
        """Whether torch alone knows which part the rank has, in equal parts; the ragged cut is then taken inside it."""
        return any(map(_torch.is_strided_shard, self.around))

    @property
    def _later_pieces(self) -> list[int]:
        """How many pieces each later `Shard(0)` makes: the ragged cut is taken inside all of them."""
        if self.axis is None:
            return []
        later = range(self.axis + 1, self.mesh.ndim)
        return [self.mesh.size(axis) for axis in later if self.around[axis] == Shard(0)]


def _beside_other_axes(fqn: str, param: DTensor, data: DataMesh) -> Home:
    """A parameter on axes of its own: the data axes, then its own."""
    given = _checked(fqn, param)
    try:
        mesh = data.joined(given.mesh)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise VescaleError(
            f"{fqn}: is sharded on {given.mesh}, which is no other axis of the mesh that {data.mesh} is part of "
            f'({error}). Slice both from one init_device_mesh(..., mesh_dim_names=("dp", "tp")): mesh["dp"] for '
            f'fully_shard, mesh["tp"] for the parameter.'
        ) from error
    around = (*(Replicate() for _ in range(data.mesh.ndim)), *given.placements)
    local = _torch.local_of(param)
    return Home(mesh, around, data.shard_axis, local.shape, _largest(fqn, given, local), given)


def _on_named_axes(fqn: str, param: torch.Tensor, data: DataMesh) -> Home:
    """A parameter on the whole mesh, of which `dp_mesh_dims` named the data axes."""
    assert data.spmd is not None
    mesh, names = data.spmd.mesh, data.spmd.names
    if not isinstance(param, DTensor):
        raise ValueError(
            f"{fqn}: When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module), got a plain tensor."
        )
    given = _checked(fqn, param)
    if given.mesh != mesh:
        raise ValueError(f"{fqn}: is on {given.mesh}, but fully_shard was given the mesh {mesh} with dp_mesh_dims")
    shards, replicas = data.spmd.shard_axes, data.spmd.replicate_axes
    for axis in (*shards, *replicas):
        if given.placements[axis] != Replicate():
            raise ValueError(
                f"{fqn}: expected Replicate() on data axis {names[axis]!r}, which fully_shard cuts itself, got "
                f"{given.placements[axis]}"
            )
    found, around, axis_of_shards = mesh, given.placements, shards[0] if shards else None
    if len(shards) > 1:
        found, around, axis_of_shards = data.spmd.flattened(data, given.placements)
    local = _torch.local_of(param)
    largest = _largest(fqn, given, local)
    return Home(found, around, axis_of_shards, local.shape, largest, given, frozenset((*shards, *replicas)))


def _checked(fqn: str, param: DTensor) -> _torch.DTensorSpec:
    given = _torch.spec_of(param)
    for placement in given.placements:
        if type(placement) not in (Shard, Replicate) and not _torch.is_strided_shard(placement):
            raise NotImplementedError(
                f"{fqn}: is placed as {given.placements} on {given.mesh}; fully_shard composes with Shard and "
                f"Replicate alone. Redistribute it before."
            )
    if type(_torch.local_of(param)) is not torch.Tensor:
        raise NotImplementedError(
            f"{fqn}: its local tensor is a {type(_torch.local_of(param)).__name__}; subclasses that gather themselves "
            f"are not built for DTensors yet. Convert the weight after fully_shard, or shard it without a DTensor."
        )
    return given


def _largest(fqn: str, given: _torch.DTensorSpec, local: torch.Tensor) -> tuple[int, ...]:
    """torch.chunk gives the first rank most."""
    if any(map(_torch.is_strided_shard, given.placements)):
        return _equal_part(fqn, given, local)
    first = (0,) * given.mesh.ndim
    return piece_of(tuple(given.shape), given.placements, tuple(given.mesh.shape), first).sizes


def _equal_part(fqn: str, given: _torch.DTensorSpec, local: torch.Tensor) -> tuple[int, ...]:
    """Which part a strided shard leaves is torch's to know; that all are equally large has to be true."""
    sizes = [given.mesh.size(axis) for axis, each in enumerate(given.placements) if not each.is_replicate()]
    if local.numel() * math.prod(sizes) != math.prod(given.shape):
        raise NotImplementedError(
            f"{fqn}: {given.placements} on {given.mesh} leave unequal parts of {tuple(given.shape)}, which fully_shard "
            f"takes of Shard alone. Pad the dim to a multiple of {math.prod(sizes)}."
        )
    return tuple(local.shape)


def ragged_shard(layout: Layout, index: int, shape: tuple[int, ...], max_flat: int | None = None) -> RaggedShard:
    """The placement of tensor `index`: whole rows where every cut lies between rows, else single elements."""
    numel = torch.Size(shape).numel()
    units = layout.units(index, numel)
    row = torch.Size(shape[1:]).numel()
    if len(shape) > 1 and numel > 0:
        unit = numel // units.total
        if all(value * unit % row == 0 for value, _ in units.runs):
            return RaggedShard((0,), units)
    return RaggedShard(tuple(range(len(shape)))[:max_flat], units)


def local_shape(placement: RaggedShard, shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Of the local tensor with `numel` elements: rows stay rows, else it is flat."""
    if placement.dims != (0,) or len(shape) < 2:
        return (numel,)
    return (numel // torch.Size(shape[1:]).numel(), *shape[1:])
