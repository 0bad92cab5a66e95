"""The loop that matrix optimizers share: it only moves tensors; a subclass says what is read, computed and written.

    class Sketch(MatrixOptimizer):
        algorithm = "sketch"
        def prepare(self, borrowed, present): ...          # element-wise, on local shards (momentum)
        def read(self, borrowed, runs): ...                # this rank's runs of what travels
        def compute(self, borrowed, matrices, values): ... # whole matrices that this rank owns
        def write(self, borrowed, runs, results): ...      # this rank's runs of the results

A parameter group with `"algorithm": "adamw"` is stepped by AdamW in the same object. Everything that differs between
ranks (which shard, empty or not) ends in `lend`; what is decided here follows from global shapes and names.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp.errors import VescaleError

from .adamw import ADAMW_DEFAULTS, adamw_step
from .aligned import align_state, aligned_grad
from .lend import BUCKET_NBYTES, Lender, Replicas, Run, flat_local
from .matrices import Matrix, matrices_of

__all__ = ["Borrowed", "MatrixOptimizer", "matrix_groups"]

Group = dict[str, Any]


@dataclass(frozen=True)
class Borrowed:
    """Parameters on one mesh whose matrices are lent together; index `matrix.tensor` into each tuple."""

    params: tuple[Tensor, ...]
    groups: tuple[Group, ...]
    names: tuple[str, ...]
    lender: Lender

    def local(self, index: int) -> Tensor:
        """The flat local elements of a parameter."""
        return flat_local(self.params[index], self.names[index])

    def local_grad(self, index: int) -> Tensor:
        """The flat local elements of its gradient, cut as the parameter is."""
        grad = aligned_grad(self.params[index], self.names[index])
        return (grad.to_local() if isinstance(grad, DTensor) else grad).reshape(-1)

    def by_group(self, runs: Sequence[Run]) -> Iterable[tuple[Group, list[int]]]:
        """Positions in `runs`, for each parameter group."""
        positions: dict[int, list[int]] = defaultdict(list)
        for position, run in enumerate(runs):
            positions[id(self.groups[run.matrix.tensor])].append(position)
        for each in positions.values():
            yield self.groups[runs[each[0]].matrix.tensor], each


class MatrixOptimizer(Optimizer):
    """Base of optimizers that need whole matrices.

    split: rows of the fused matrices of a parameter, by its fqn; see `matrices_of`.
    flatten: fqns of 3-d parameters that are convolutions (one matrix) and not stacks of matrices.
    bucket_nbytes: whole matrices on their way to a rank at a time, see `lend`.
    replicas: whether HSDP replicas repeat the work or share it.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        params: Any,
        defaults: Group,
        *,
        split: Mapping[str, Sequence[int]] | None = None,
        flatten: Collection[str] = (),
        bucket_nbytes: int = BUCKET_NBYTES,
        replicas: Replicas = Replicas.REPEAT,
    ) -> None:
        self._split = {fqn: tuple(rows) for fqn, rows in (split or {}).items()}
        self._flatten = frozenset(flatten)
        self._bucket_nbytes = bucket_nbytes
        self._replicas = Replicas(replicas)
        self._borrowed: tuple[tuple[Any, ...], tuple[Borrowed, ...]] | None = None
        super().__init__(params, {**defaults, "algorithm": self.algorithm})
        named = {name for group in self.param_groups for name in group.get("param_names", ())}
        for fqn in (*self._split, *self._flatten):
            if fqn not in named:
                raise VescaleError(
                    f"{fqn}: split or flatten names no parameter. Construct {type(self).__name__} from "
                    "named_parameters() (or groups of named parameters), with this name among them."
                )

    def add_param_group(self, param_group: Group) -> None:
        param_group = dict(param_group)  # groups may be given to several optimizers, which have defaults of their own
        algorithm = param_group.setdefault("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, "adamw"):
            raise VescaleError(f'"algorithm": expected "{self.algorithm}" or "adamw", got {algorithm!r}.')
        if algorithm == "adamw":
            for key, value in ADAMW_DEFAULTS.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)
        if algorithm == self.algorithm:
            group = self.param_groups[-1]
            for name, param in zip(_names(self.param_groups, group), group["params"], strict=True):
                self._matrices(name, param, 0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. All ranks call it together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for borrowed in self.borrowed():
            present = [
                index for index, param in enumerate(borrowed.params) if self._has_gradient(borrowed, param, index)
            ]
            skipped = borrowed.lender(
                partial(self.read, borrowed),
                partial(self.compute, borrowed),
                partial(self.write, borrowed),
                absent=frozenset(range(len(borrowed.params))).difference(present),
                failure=self._failure(borrowed, present),
            )
            self.conclude(borrowed, [index for index in range(len(borrowed.params)) if index not in skipped])
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw_step(zip(_names(self.param_groups, group), group["params"], strict=True), self.state, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state is copied, and keeps its own dtype, which torch casts to the parameter's."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                loaded = self.state[param][key]
                if torch.is_tensor(value) and (value is loaded or value.dtype != loaded.dtype):
                    self.state[param][key] = value.to(loaded.device, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, in one order on all ranks: owners make state before others, and gathers go by the order."""
        found = super().state_dict()
        found["state"] = {number: dict(sorted(found["state"][number].items())) for number in sorted(found["state"])}
        return found

    def borrowed(self) -> tuple[Borrowed, ...]:
        """The parameters whose matrices are lent, by mesh; prepared once, and again when parameters change."""
        entries = [
            (param, group, name)
            for group in self.param_groups
            if group["algorithm"] == self.algorithm
            for name, param in zip(_names(self.param_groups, group), group["params"], strict=True)
        ]
        key = tuple((id(p), id(group), _layout(p), self.travel_dtype(p, group)) for p, group, _ in entries)
        if self._borrowed is None or self._borrowed[0] != key:
            meshes: dict[Any, list[tuple[Tensor, Group, str]]] = defaultdict(list)
            for entry in entries:
                meshes[_mesh(entry[0]), self.travel_dtype(entry[0], entry[1])].append(entry)
            self._borrowed = key, tuple(self._borrow(each, dtype) for (_, dtype), each in meshes.items())
        return self._borrowed[1]

    def explain(self) -> str:
        """Which matrices travel, how many buckets a step has, and how even the owners' loads are."""
        return "\n".join(borrowed.lender.explain() for borrowed in self.borrowed())

    def travel_dtype(self, param: Tensor, group: Group) -> torch.dtype:
        """In which dtype the matrices of a parameter travel and are computed."""
        return param.dtype

    def cost(self, matrix: Matrix) -> int | None:
        """What a matrix costs its owner; None for the operations of Newton-Schulz."""
        return None

    def matrices_of(self, name: str, param: Tensor, index: int) -> tuple[Matrix, ...]:
        """The matrices of parameter number `index`, as runs of whole rows."""
        return self._matrices(name, param, index)

    def reorder(
        self, matrices: Sequence[Matrix], owners: Sequence[int], whole: Sequence[int | None], sizes: tuple[int, ...]
    ) -> Sequence[int]:
        """A last word on the owners; `whole[i]` is the rank that holds matrix i whole, or None.

        Ranks are numbered row-major over the mesh axes that are travelled, whose `sizes` these are.
        """
        return owners

    def prepare(self, borrowed: Borrowed, present: Sequence[int]) -> None:
        """Element-wise work on local shards, for the parameters (by index) that have a gradient."""

    @abstractmethod
    def read(self, borrowed: Borrowed, runs: Sequence[Run]) -> Sequence[Tensor]:
        """What travels: the 1-d values of this rank's runs."""

    @abstractmethod
    def compute(self, borrowed: Borrowed, matrices: Sequence[Matrix], values: list[Tensor]) -> Sequence[Tensor]:
        """The results for whole matrices that this rank owns; `values` are not to be changed."""

    @abstractmethod
    def write(self, borrowed: Borrowed, runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        """Apply the results for this rank's runs."""

    def conclude(self, borrowed: Borrowed, updated: Sequence[int]) -> None:
        """After the step, with the same parameters (by index) on all ranks, also where a rank holds nothing of them."""

    def _matrices(self, name: str, param: Tensor, index: int) -> tuple[Matrix, ...]:
        split = self._split.get(name)
        return matrices_of(param.shape, tensor=index, split=split, flatten=name in self._flatten, fqn=name)

    def _borrow(self, entries: Sequence[tuple[Tensor, Group, str]], dtype: torch.dtype) -> Borrowed:
        params, groups, names = zip(*entries, strict=True)
        for param, name in zip(params, names, strict=True):
            flat_local(param, name)  # refuse what is not contiguous before anything changes
        each = (self.matrices_of(name, param, index) for index, (param, _, name) in enumerate(entries))
        matrices = tuple(itertools.chain.from_iterable(each))
        has_cost = bool(matrices) and self.cost(matrices[0]) is not None
        lender = Lender(
            params,
            matrices,
            cost=(lambda matrix: self.cost(matrix) or 0) if has_cost else None,
            reorder=self.reorder,
            bucket_nbytes=self._bucket_nbytes,
            dtype=dtype,
            replicas=self._replicas,
            names=names,
        )
        return Borrowed(params, groups, names, lender)

    def _failure(self, borrowed: Borrowed, present: Sequence[int]) -> Exception | None:
        """What `prepare` raised on this rank: the others are told with the first matrices, and raise, too."""
        try:
            for param, name in zip(borrowed.params, borrowed.names, strict=True):
                if state := self.state.get(param):
                    align_state(state, param, name)
            self.prepare(borrowed, present)
        except Exception as error:
            return error
        return None

    def _has_gradient(self, borrowed: Borrowed, param: Tensor, index: int) -> bool:
        if param.grad is None:
            return False
        if param.is_complex() or param.grad.is_sparse:
            kind = "complex" if param.is_complex() else "sparse"
            raise VescaleError(f"{borrowed.names[index]}: {type(self).__name__} does not support {kind} gradients.")
        return True


def matrix_groups(
    module: nn.Module, *, adamw: Callable[[str, Tensor], bool] | None = None, **adamw_options: Any
) -> list[Group]:
    """Two groups of named parameters: the hidden matrices, and everything else for AdamW with `adamw_options`.

    Everything else: fewer than two dims, the weights of `nn.Embedding` (and what is tied to them), and the parameters
    for which `adamw(fqn, param)` is true (an output head, say).
    """
    embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    hidden: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    for fqn, param in module.named_parameters():
        is_other = param.ndim < 2 or id(param) in embeddings or (adamw is not None and adamw(fqn, param))
        (others if is_other else hidden).append((fqn, param))
    groups: list[Group] = [{"params": hidden}, {"params": others, "algorithm": "adamw", **adamw_options}]
    return [group for group in groups if group["params"]]


def _names(groups: Sequence[Group], group: Group) -> Sequence[str]:
    number = next(i for i, each in enumerate(groups) if each is group)
    names: Sequence[str] | None = group.get("param_names")
    if names and len(names) != len(group["params"]):
        raise VescaleError(
            f"param_groups[{number}]: expected a name for each of {len(group['params'])} parameters, got {len(names)}. "
            "Add parameters by add_param_group."
        )
    return names or [f"param_groups[{number}].params[{i}]" for i in range(len(group["params"]))]


def _mesh(param: Tensor) -> DeviceMesh | None:
    return param.device_mesh if isinstance(param, DTensor) else None


def _layout(param: Tensor) -> Any:
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
