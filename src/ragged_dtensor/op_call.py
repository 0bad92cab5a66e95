"""One op on ragged tensors as a rule sees it: its arguments, its result's shape, and what a rule may answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_dtensor import _torch
from ragged_dtensor._torch import DTensorSpec, OpSchema, OutputSharding, TensorMeta
from ragged_dtensor.errors import UnsupportedOpError
from ragged_dtensor.placement import RaggedShard

Placements = tuple[Placement, ...]

# The name under which a rule finds a tensor argument: the argument's index or keyword, and its index in a list.
Where = tuple[int | str, int | None]


@dataclass(frozen=True)
class Operand:
    """A tensor argument: where it stands, how it is placed, and whether it only receives the result (`out=`)."""

    where: Where
    spec: DTensorSpec
    is_output: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.spec)

    @property
    def is_ragged(self) -> bool:
        return is_ragged(self.spec)


@dataclass(frozen=True)
class Local:
    """An answer that runs `compute` on the local arguments; its results become DTensors of `spec`.

    For ops whose local computation is another one than the op itself. An op that writes into its first argument returns
    that argument. Ranks outside of the mesh compute nothing. `redistributed` holds the operands' specs if some change.
    """

    spec: Any
    compute: Callable[..., Any]
    redistributed: OpSchema | None = None


Answer = OutputSharding | Local


@dataclass(frozen=True)
class OpCall:
    """An op and its arguments; `schema` holds them with specs in place of tensors."""

    op: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]
    info: Any

    @property
    def schema(self) -> OpSchema:
        schema: OpSchema = self.info.schema
        return schema

    @functools.cached_property
    def name(self) -> str:
        """The op's name without namespace and overload: "add_" of aten::add_.Tensor."""
        return str(self.op._schema.name).partition("::")[2]

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """All tensor arguments, those in lists included."""
        arguments: list[tuple[int | str, object]] = [
            *enumerate(self.schema.args_schema),
            *self.schema.kwargs_schema.items(),
        ]
        return tuple(_operands(arguments, self.output_names))

    @functools.cached_property
    def output_names(self) -> tuple[str, ...]:
        """The keywords that take tensors to receive the results."""
        return tuple(argument.name for argument in self.op._schema.arguments if argument.is_out)

    @functools.cached_property
    def ragged(self) -> Operand:
        """The first ragged operand."""
        return next(operand for operand in self.operands if operand.is_ragged)

    @property
    def spec(self) -> DTensorSpec:
        """The spec of the first argument, where that is a tensor."""
        spec = self.schema.args_schema[0] if self.schema.args_schema else None
        if not isinstance(spec, DTensorSpec):
            raise refusal(self)
        return spec

    @property
    def mesh(self) -> DeviceMesh:
        return self.ragged.spec.mesh

    @functools.cached_property
    def key(self) -> Any:
        """What an answer may depend on, hashable; None if some argument is not."""
        key = (self.op, _frozen(self.schema.args_schema), _frozen(self.schema.kwargs_schema))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    @property
    def is_inplace(self) -> bool:
        return bool(self.op._schema.is_mutable) and self.name.endswith("_")

    def argument(self, name: str, default: object = None) -> Any:
        """The argument called `name` in the op's schema, with a spec in place of a tensor."""
        for index, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if name in self.schema.kwargs_schema:
                    return self.schema.kwargs_schema[name]
                if index < len(self.schema.args_schema) and not argument.kwarg_only:
                    return self.schema.args_schema[index]
                return argument.default_value if argument.default_value is not None else default
        return default

    @functools.cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        """Global shape, stride and dtype of the results."""
        metas = _torch.propagate_tensor_meta(self.schema)
        if metas is None:
            return ()
        return (metas,) if isinstance(metas, TensorMeta) else tuple(metas)  # type: ignore[arg-type]

    def with_operand_specs(self, wanted: dict[Where, DTensorSpec]) -> OpSchema:
        """The op's schema with other specs for some of the positional operands."""
        args = list(self.schema.args_schema)
        for (position, index), spec in wanted.items():
            assert isinstance(position, int)
            if index is None:
                args[position] = spec
            else:
                items = list(args[position])  # type: ignore[call-overload]
                items[index] = spec
                args[position] = type(args[position])(items)  # type: ignore[call-arg]
        return OpSchema(self.op, tuple(args), self.schema.kwargs_schema, schema_info=self.schema.schema_info)


def _frozen(argument: object) -> object:
    """A hashable twin. Numbers keep their type: 2 and 2.0 lead to different dtypes."""
    if isinstance(argument, dict):
        return tuple((name, _frozen(value)) for name, value in argument.items())
    if isinstance(argument, list | tuple):
        return type(argument).__name__, tuple(map(_frozen, argument))
    return (type(argument), argument) if isinstance(argument, int | float | complex) else argument


def _operands(arguments: Iterable[tuple[int | str, object]], outputs: Sequence[str]) -> Iterator[Operand]:
    for where, argument in arguments:
        if isinstance(argument, DTensorSpec):
            yield Operand((where, None), argument, where in outputs)
        elif isinstance(argument, list | tuple):
            for index, item in enumerate(argument):
                if isinstance(item, DTensorSpec):
                    yield Operand((where, index), item)


def is_ragged(spec: DTensorSpec) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in spec.placements)


def dtype_of(spec: DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None
    return spec.tensor_meta.dtype


def num_flat(placements: Sequence[Placement]) -> int:
    """How many leading dims the ragged placements flatten into the local tensor's dim 0."""
    return max(placement.num_flat for placement in placements if isinstance(placement, RaggedShard))


def spec_like(spec: DTensorSpec, placements: Sequence[Placement], meta: TensorMeta | None) -> DTensorSpec:
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)


def refusal(call: OpCall, reason: str = "", remedy: str = "") -> UnsupportedOpError:
    """The error for an op without an answer: the op, the placement, why, and what to do."""
    spec = call.ragged.spec
    hint = INIT_HINT if call.name in OPS_OF_INITIALISERS else ""
    return UnsupportedOpError(
        f"{call.op} is not supported on a ragged tensor of shape {tuple(spec.shape)} placed as "
        f"{list(spec.placements)}{': ' + reason if reason else ''}. {remedy or whole_tensor(spec)}{hint}"
    )


# Where orthogonal_, dirac_, sparse_, eye_ and initialisers like them first touch single elements or whole matrices.
OPS_OF_INITIALISERS = {
    "_index_put_impl_",
    "eye",
    "index_put_",
    "linalg_qr",
    "new_empty",
    "select",
    "slice",
    "t_",
    "transpose_",
}
INIT_HINT = " To initialise it, call ragged_dtensor.init_full(tensor, fn), for instance fn=torch.nn.init.orthogonal_."


def whole_tensor(spec: DTensorSpec) -> str:
    """The call that makes any op work."""
    placements = ", ".join(str(_whole(placement)) for placement in spec.placements)
    return f"Redistribute first: x.redistribute(placements=[{placements}])."


def _whole(placement: Placement) -> str:
    if isinstance(placement, RaggedShard | Partial):
        return "Replicate()"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else repr(placement)


def replicated(mesh: DeviceMesh) -> Placements:
    return (Replicate(),) * mesh.ndim


def is_participating(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def flat_dim(dim: int, flat: int) -> int:
    """A dim of the full tensor as a dim of the local one, whose dim 0 holds the first `flat` dims."""
    return 0 if dim < flat else dim - flat + 1


def local_dims(dims: Sequence[int], flat: int) -> tuple[int, ...]:
    return tuple(sorted({flat_dim(dim, flat) for dim in dims}))


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
