"""The loop that blocked optimizers share: panels of rows are lent, and every block is updated by its panel's owner.

    class Sketch(PanelOptimizer):
        algorithm = "sketch"
        kinds = {"factors": Kind.SIDES}
        def update(self, grad_MN, views, step): ...   # one block: its update; `views` of its state move on in place

A matrix is cut into panels of `max_block_dim` rows, and each panel into blocks of as many columns. A panel is a
contiguous run: where a shard holds it whole (granularity "rows" of as many rows, or "whole") nothing travels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fsdp._torch import foreach_add_, foreach_mul_
from vescale_fsdp.errors import VescaleError

from .lend import Run
from .matrices import Matrix, cuts, panels_of
from .optimizer import Borrowed, Group, MatrixOptimizer
from .panel_owners import ascending_owners
from .panel_state import BlockViews, Kind, PanelStates

__all__ = ["PanelOptimizer"]


class PanelOptimizer(MatrixOptimizer):
    """Base of optimizers whose state belongs to blocks of at most `max_block_dim` rows and columns.

    State of a parameter: `step`, and for each name in `kinds` a 1-d DTensor with a RaggedShard over each axis along
    which matrices travel; it holds the panels in memory order, each by its owner. All ranks hold the same names. Over
    several axes (tensor parallelism, replicas that share) the owners of one parameter stand on one line of ranks.
    """

    kinds: Mapping[str, Kind]

    def __init__(self, params: Any, defaults: Group, *, max_block_dim: int = 1024, **options: Any) -> None:
        if max_block_dim < 1:
            raise VescaleError(f"max_preconditioner_dim: expected at least 1, got {max_block_dim}.")
        self.max_block_dim = max_block_dim
        super().__init__(params, defaults, **options)

    @abstractmethod
    def update(self, grad_MN: Tensor, views: BlockViews, step: int) -> Tensor:
        """The update of one block at step number `step` (from 1)."""

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay"):
            if not float(group[name]) >= 0:
                raise VescaleError(f"{name}: expected {name} >= 0, got {group[name]}.")

    def matrices_of(self, name: str, param: Tensor, index: int) -> tuple[Matrix, ...]:
        matrices = super().matrices_of(name, param, index)
        return tuple(panel for matrix in matrices for panel in panels_of(matrix, self.max_block_dim))

    def cost(self, matrix: Matrix) -> int:
        """Products with both sides of every block."""
        blocks = [(matrix.rows, end - begin) for begin, end in cuts(matrix.columns, self.max_block_dim)]
        return sum(self.block_cost(rows, columns) for rows, columns in blocks)

    def block_cost(self, rows: int, columns: int) -> int:
        """What the update of one block costs, in operations."""
        return 8 * rows * columns * (rows + columns)

    def reorder(
        self, matrices: Sequence[Matrix], owners: Sequence[int], whole: Sequence[int | None], sizes: tuple[int, ...]
    ) -> Sequence[int]:
        costs = [self.cost(matrix) for matrix in matrices]
        return ascending_owners(matrices, owners, whole, sizes=sizes, costs=costs)

    def prepare(self, borrowed: Borrowed, present: Sequence[int]) -> None:
        for index, param in enumerate(borrowed.params):
            if state := self.state.get(param):
                self._layout(borrowed, index).settle(self.kinds, state)

    def read(self, borrowed: Borrowed, runs: Sequence[Run]) -> list[Tensor]:
        return [run.of(borrowed.local_grad(run.matrix.tensor)) for run in runs]

    def compute(self, borrowed: Borrowed, matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        views = {index: self._views(borrowed, index) for index in {matrix.tensor for matrix in matrices}}
        results = []
        for matrix, value_MN in zip(matrices, values, strict=True):
            step = self.step_number(borrowed, matrix.tensor)
            result_MN = torch.empty_like(value_MN)
            blocks = cuts(matrix.columns, self.max_block_dim)
            for (begin, end), block in zip(blocks, views[matrix.tensor][matrix.begin], strict=True):
                result_MN[:, begin:end] = self.update(value_MN[:, begin:end], block, step)
            results.append(result_MN)
        return results

    def write(self, borrowed: Borrowed, runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        for group, positions in borrowed.by_group(runs):
            self.apply(borrowed, group, [runs[i] for i in positions], [results[i] for i in positions])

    def apply(self, borrowed: Borrowed, group: Group, runs: Sequence[Run], updates: Sequence[Tensor]) -> None:
        """Decay the weights, then subtract the updates, for this rank's runs of one parameter group."""
        if not runs:
            return
        lr = float(group["lr"])
        params = [run.of(borrowed.local(run.matrix.tensor)) for run in runs]
        foreach_mul_(params, 1 - lr * group["weight_decay"])
        foreach_add_(params, updates, alpha=-lr)

    def conclude(self, borrowed: Borrowed, updated: Sequence[int]) -> None:
        for index in updated:
            self.step_number(borrowed, index)
            self._views(borrowed, index)
            self.state[borrowed.params[index]]["step"] += 1

    def step_number(self, borrowed: Borrowed, index: int) -> int:
        """The number of the step under way, from 1."""
        state = self.state[borrowed.params[index]]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        return int(state["step"]) + 1

    def _views(self, borrowed: Borrowed, index: int) -> dict[int, list[BlockViews]]:
        """The state of the owned blocks, by the begin of their panel; zeros where there is none yet."""
        param, state = borrowed.params[index], self.state[borrowed.params[index]]
        layout = self._layout(borrowed, index)
        if not layout.panels:
            return {}
        for name, kind in self.kinds.items():
            if name not in state:
                state[name] = layout.zeros(kind, param)
        return layout.views(self.kinds, state)

    def _layout(self, borrowed: Borrowed, index: int) -> PanelStates:
        return PanelStates.of(borrowed.lender.terms, index, borrowed.names[index], self.max_block_dim)
