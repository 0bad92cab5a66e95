"""Where the state of blocks lies: in 1-d tensors whose runs belong to the owners of the panels (rows of blocks).

w (6, 5), blocks of at most 4:   panel 0 = rows 0..4, blocks (4, 4) (4, 1)     owner 0
                                 panel 1 = rows 4..6, blocks (2, 4) (2, 1)     owner 1

factors   | 4*4 + 4*4 | 4*4 + 1*1 || 2*2 + 4*4 | 2*2 + 1*1 |     49 elements on rank 0, 25 on rank 1
square    |    4*4    |    4*1    ||    2*4    |    2*1    |     20 elements on rank 0, 10 on rank 1
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ragged_dtensor import RaggedShard

from .lend import flat_local
from .matrices import Matrix, cuts
from .terms import Place, Terms

__all__ = ["BlockViews", "Kind", "PanelStates", "ascending_owners"]


class Kind(Enum):
    """What a state holds for a block of M rows and N columns: two squares, (M, M) and (N, N), or one (M, N)."""

    SIDES = "sides"
    BLOCK = "block"

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
        return ((rows, rows), (columns, columns)) if self is Kind.SIDES else ((rows, columns),)


# The views of one block's state: for each name, its tensors in the order of its kind.
BlockViews = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class PanelStates:
    """The 1-d state tensors of one parameter: its panels in memory order, and their owners, which never descend."""

    fqn: str
    place: Place
    panels: tuple[Matrix, ...]
    owners: tuple[int, ...]
    max_block_dim: int

    @classmethod
    def of(cls, terms: Terms, index: int, fqn: str, max_block_dim: int) -> PanelStates:
        """For parameter number `index`. Raises NotImplementedError if matrices travel along several mesh axes."""
        if len(terms.place.axes) > 1:
            raise NotImplementedError(
                f"{fqn}: the state of blocks lies on one sharded mesh axis, but parameters on this mesh are sharded "
                f"over axes {terms.place.axes}. Use Muon, or leave tensor parallelism."
            )
        pairs = sorted(terms.of_tensor(index), key=lambda pair: pair[0].begin)
        panels, owners = tuple(panel for panel, _ in pairs), tuple(owner for _, owner in pairs)
        return cls(fqn, terms.place, panels, owners, max_block_dim)

    def blocks(self, panel: Matrix) -> list[tuple[int, int]]:
        """Rows and columns of each block."""
        return [(panel.rows, end - begin) for begin, end in cuts(panel.columns, self.max_block_dim)]

    def numel(self, kind: Kind, panel: Matrix) -> int:
        return sum(math.prod(shape) for block in self.blocks(panel) for shape in kind.shapes(*block))

    def zeros(self, kind: Kind, param: Tensor) -> Tensor:
        """A state tensor, a DTensor if the parameter is one."""
        counts = [0] * self.place.num_ranks
        for panel, owner in zip(self.panels, self.owners, strict=True):
            counts[owner] += self.numel(kind, panel)
        local = torch.zeros(counts[self._here], dtype=state_dtype(param), device=self.place.device)
        if not isinstance(param, DTensor):
            return local
        mesh, axes = param.device_mesh, self.place.axes
        placements = [RaggedShard((0,), counts) if axis in axes else Replicate() for axis in range(mesh.ndim)]
        shape = torch.Size((sum(counts),))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(1,))

    def views(self, kinds: Mapping[str, Kind], states: Mapping[str, Tensor]) -> dict[int, list[BlockViews]]:
        """The states of this rank's blocks, as views, by the begin of their panel."""
        rest = {name: flat_local(states[name], f"{self.fqn}: {name}") for name in kinds}

        def take(name: str, shape: tuple[int, int]) -> Tensor:
            view, rest[name] = rest[name].tensor_split((math.prod(shape),))
            return view.view(shape)

        views: dict[int, list[BlockViews]] = {}
        for panel, owner in zip(self.panels, self.owners, strict=True):
            if owner == self._here:
                views[panel.begin] = [
                    {name: tuple(take(name, shape) for shape in kind.shapes(*block)) for name, kind in kinds.items()}
                    for block in self.blocks(panel)
                ]
        return views

    @property
    def _here(self) -> int:
        return self.place.here[0] if self.place.axes else 0


def state_dtype(param: Tensor) -> torch.dtype:
    """The state of blocks is never kept in less than float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def ascending_owners(matrices: Sequence[Matrix], owners: Sequence[int], whole: Sequence[int | None]) -> list[int]:
    """Owners that never descend along a parameter, so that what a rank owns is one run of the parameter's state.

    A panel that lies whole on a rank (`whole`) stays there.
    """
    by_tensor: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(len(matrices)), key=lambda number: matrices[number].begin):
        by_tensor[matrices[number].tensor].append(number)
    ordered = list(owners)
    for numbers in by_tensor.values():
        ascending = _ascending([owners[number] for number in numbers], [whole[number] for number in numbers])
        for number, owner in zip(numbers, ascending, strict=True):
            ordered[number] = owner
    return ordered


def _ascending(owners: Sequence[int], pinned: Sequence[int | None]) -> list[int]:
    """`owners` sorted between the pinned ones, and within their bounds; all sorted when the pinned ones descend."""
    fixed = [owner for owner in pinned if owner is not None]
    if fixed != sorted(fixed):
        return sorted(owners)
    result: list[int] = []
    free: list[int] = []
    low = 0
    for owner, pin in [*zip(owners, pinned, strict=True), (0, max(owners, default=0))]:
        if pin is None:
            free.append(owner)
            continue
        result += [min(max(each, low), pin) for each in sorted(free)]
        result.append(pin)
        free, low = [], pin
    return result[:-1]
