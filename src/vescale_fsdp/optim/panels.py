"""Where the state of Shampoo's blocks lies: panels of rows, and 1-d tensors whose runs belong to the panels' owners.

w (6, 5), blocks of at most 4:   panel 0 = rows 0..4, blocks (4, 4) (4, 1)     owner 0
                                 panel 1 = rows 4..6, blocks (2, 4) (2, 1)     owner 1

factors   | 4*4 + 4*4 | 4*4 + 1*1 || 2*2 + 4*4 | 2*2 + 1*1 |     49 elements on rank 0, 25 on rank 1
square    |    4*4    |    4*1    ||    2*4    |    2*1    |     20 elements on rank 0, 10 on rank 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ragged_dtensor import RaggedShard

from .lend import flat_local
from .matrices import Matrix
from .preconditioner import BlockState, column_blocks
from .terms import Place, Terms

__all__ = ["STATES", "PanelStates", "panels_of"]

STATES = ("factors", "roots", "square")


def panels_of(matrix: Matrix, max_preconditioner_dim: int) -> tuple[Matrix, ...]:
    """The matrix in panels of at most so many rows."""
    return tuple(
        Matrix(matrix.tensor, matrix.begin + begin * matrix.columns, end - begin, matrix.columns)
        for begin, end in column_blocks(matrix.rows, max_preconditioner_dim)
    )


@dataclass(frozen=True)
class PanelStates:
    """The 1-d state tensors of one parameter: its panels in memory order, and their owners, which never descend."""

    fqn: str
    place: Place
    panels: tuple[Matrix, ...]
    owners: tuple[int, ...]
    max_preconditioner_dim: int

    @classmethod
    def of(cls, terms: Terms, index: int, fqn: str, max_preconditioner_dim: int) -> PanelStates:
        """For parameter number `index`. Raises NotImplementedError if matrices travel along several mesh axes."""
        if len(terms.place.axes) > 1:
            raise NotImplementedError(
                f"{fqn}: Shampoo keeps its state on one sharded mesh axis, but the parameters on this mesh are sharded "
                f"over axes {terms.place.axes}. Use Muon, or leave tensor parallelism."
            )
        pairs = sorted(terms.of_tensor(index), key=lambda pair: pair[0].begin)
        panels, owners = tuple(panel for panel, _ in pairs), tuple(owner for _, owner in pairs)
        return cls(fqn, terms.place, panels, owners, max_preconditioner_dim)

    def blocks(self, panel: Matrix) -> list[tuple[int, int]]:
        """Rows and columns of each block."""
        return [(panel.rows, end - begin) for begin, end in column_blocks(panel.columns, self.max_preconditioner_dim)]

    def numel(self, name: str, panel: Matrix) -> int:
        if name == "square":
            return panel.numel
        return sum(rows**2 + columns**2 for rows, columns in self.blocks(panel))

    def zeros(self, name: str, param: Tensor) -> Tensor:
        """The state tensor `name`, a DTensor if the parameter is one."""
        counts = [0] * self.place.num_ranks
        for panel, owner in zip(self.panels, self.owners, strict=True):
            counts[owner] += self.numel(name, panel)
        local = torch.zeros(counts[self._here], dtype=state_dtype(param), device=self.place.device)
        if not isinstance(param, DTensor):
            return local
        mesh, axes = param.device_mesh, self.place.axes
        placements = [RaggedShard((0,), counts) if axis in axes else Replicate() for axis in range(mesh.ndim)]
        shape = torch.Size((sum(counts),))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(1,))

    def views(self, states: Mapping[str, Tensor]) -> dict[int, list[BlockState]]:
        """The states of this rank's blocks, as views, by the begin of their panel."""
        rest = {name: flat_local(state, f"{self.fqn}: {name}") for name, state in states.items()}
        none = rest["factors"].new_zeros(())

        def take(name: str, rows: int, columns: int) -> Tensor:
            if name not in rest:
                return none
            view, rest[name] = rest[name].tensor_split((rows * columns,))
            return view.view(rows, columns)

        views: dict[int, list[BlockState]] = {}
        for panel, owner in zip(self.panels, self.owners, strict=True):
            if owner == self._here:
                views[panel.begin] = [
                    BlockState(
                        take("factors", m, m),
                        take("factors", n, n),
                        take("roots", m, m),
                        take("roots", n, n),
                        take("square", m, n),
                    )
                    for m, n in self.blocks(panel)
                ]
        return views

    @property
    def _here(self) -> int:
        return self.place.here[0] if self.place.axes else 0


def state_dtype(param: Tensor) -> torch.dtype:
    """Factors and roots are never kept in less than float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
