"""Where the state of blocks lies: in 1-d tensors whose runs belong to the owners of the panels (rows of blocks).

w (6, 5), blocks of at most 4:   panel 0 = rows 0..4, blocks (4, 4) (4, 1)     owner 0
                                 panel 1 = rows 4..6, blocks (2, 4) (2, 1)     owner 1

factors   | 4*4 + 4*4 | 4*4 + 1*1 || 2*2 + 4*4 | 2*2 + 1*1 |     49 elements on rank 0, 25 on rank 1
square    |    4*4    |    4*1    ||    2*4    |    2*1    |     20 elements on rank 0, 10 on rank 1

Where matrices travel along several mesh axes, the owners of one parameter stand on one line of ranks along the longest
of them; which line it is differs from parameter to parameter. On a (2, 4) mesh the parameter above may have the owners
(1, 0) and (1, 1), and its state the placements RaggedShard((0,), (0, 1)), RaggedShard((0,), (49, 25, 0, 0)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import RaggedShard
from vescale_fsdp.errors import VescaleError

from .lend import flat_local
from .matrices import Matrix, cuts
from .terms import Place, Terms, ravel, unravel

__all__ = ["BlockViews", "Kind", "PanelStates"]


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
        """For parameter number `index`."""
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
        numels = [self.numel(kind, panel) for panel in self.panels]
        mine = sum(numel for numel, owner in zip(numels, self.owners, strict=True) if owner == self._here)
        local = torch.zeros(mine, dtype=state_dtype(param), device=self.place.device)
        if not isinstance(param, DTensor):
            return local
        shape = torch.Size((sum(numels),))
        placements = self.placements(kind)
        return DTensor.from_local(local, param.device_mesh, placements, run_check=False, shape=shape, stride=(1,))

    def placements(self, kind: Kind) -> tuple[Placement, ...]:
        """Of a state tensor: the owners' shares along their line, the one line they stand on along the other axes."""
        if self.place.mesh is None:
            return ()
        shares = [[0] * size for size in self.place.sizes]
        for panel, owner in zip(self.panels, self.owners, strict=True):
            numel = self.numel(kind, panel)
            for share, at in zip(shares, unravel(owner, self.place.sizes), strict=True):
                share[at] += numel
        by_axis = dict(zip(self.place.axes, shares, strict=True))
        axes = range(self.place.mesh.ndim)
        return tuple(RaggedShard((0,), by_axis[axis]) if axis in by_axis else Replicate() for axis in axes)

    def settle(self, kinds: Mapping[str, Kind], states: dict[str, Tensor]) -> None:
        """Bring state that other owners left (it was loaded, or parameters were added) to its owners. Collective."""
        for name in (name for name in kinds if self.panels and name in states):
            state, placements = states[name], self.placements(kinds[name])
            if (state.device_mesh if isinstance(state, DTensor) else None) != self.place.mesh:
                raise VescaleError(
                    f"{self.fqn}: its state {name} is not on the parameter's mesh {self.place.mesh}. Load a state dict "
                    "through torch.distributed.checkpoint, which fits it to the parameters."
                )
            if isinstance(state, DTensor) and state.placements != placements:
                states[name] = state.redistribute(placements=placements)

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
        return ravel(self.place.here, self.place.sizes)


def state_dtype(param: Tensor) -> torch.dtype:
    """The state of blocks is never kept in less than float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
