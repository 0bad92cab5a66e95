"""Shampoo in blocks, with grafting, on parameters sharded in any way.

    optimizer = Shampoo(matrix_groups(model, lr=3e-4), lr=1e-3, max_preconditioner_dim=1024, precondition_frequency=10)

A matrix is cut into panels of `max_preconditioner_dim` rows, and each panel into blocks of as many columns. A panel is
a contiguous run: where a shard holds it whole (granularity "rows" of as many rows, or "whole") nothing travels; other
panels are lent to an owner. Every block is preconditioned once, so that results do not depend on the number of ranks.

State of a parameter, all DTensors, so that checkpoints reshard them like any other:

    step        how many steps, a plain tensor
    exp_avg     the parameter's shape and placements (absent when beta1 = 0)
    factors     1-d: for each panel in memory order and each of its blocks, L (M, M) and then R (N, N)
    roots       1-d, in the same order: L^(-1/4) and R^(-1/4)
    square      1-d: for each panel and block, the grafted method's second moment (M, N) (absent where it has none)

The 1-d tensors have a RaggedShard over the axis along which matrices travel: a rank holds the panels that it owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fsdp._torch import foreach_add_, foreach_lerp_, foreach_mul_
from vescale_fsdp.errors import VescaleError

from .lend import BUCKET_NBYTES, Run, flat_local
from .matrices import Matrix
from .optimizer import Borrowed, Group, MatrixOptimizer
from .panels import STATES, PanelStates, panels_of
from .preconditioner import BlockState, Grafting, ShampooOptions, column_blocks, precondition

__all__ = ["Shampoo"]


class Shampoo(MatrixOptimizer):
    """Shampoo whose blocks are preconditioned by the ranks that own them.

    lr, beta1, weight_decay: learning rate; decay of the mean of the preconditioned updates, bias-corrected; decoupled
        weight decay. These three may differ between parameter groups, the others are the optimizer's.
    beta2, epsilon, precondition_frequency, start_preconditioning_step, grafting, grafting_epsilon: `ShampooOptions`.
    max_preconditioner_dim: the largest block.
    split, flatten, bucket_nbytes: see `MatrixOptimizer`. A group with `"algorithm": "adamw"` is stepped by AdamW.

    Raises NotImplementedError for parameters that are sharded over two mesh axes (tensor parallelism).
    """

    algorithm = "shampoo"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        max_preconditioner_dim: int = 1024,
        precondition_frequency: int = 1,
        start_preconditioning_step: int = 1,
        grafting: Grafting | None = "adam",
        grafting_epsilon: float = 1e-8,
        split: Mapping[str, Sequence[int]] | None = None,
        flatten: Collection[str] = (),
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> None:
        if max_preconditioner_dim < 1:
            raise VescaleError(f"max_preconditioner_dim: expected at least 1, got {max_preconditioner_dim}.")
        self.options = ShampooOptions(
            beta2, epsilon, precondition_frequency, start_preconditioning_step, grafting, grafting_epsilon
        )
        self.max_preconditioner_dim = max_preconditioner_dim
        defaults = {"lr": lr, "beta1": beta1, "weight_decay": weight_decay}
        super().__init__(params, defaults, split=split, flatten=flatten, bucket_nbytes=bucket_nbytes)
        for borrowed in self.borrowed():
            PanelStates.of(borrowed.lender.terms, 0, borrowed.names[0], max_preconditioner_dim)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] == self.algorithm:
            if not 0 <= group["beta1"] < 1:
                raise VescaleError(f"beta1: expected 0 <= beta1 < 1, got {group['beta1']}.")
            for name in ("lr", "weight_decay"):
                if not float(group[name]) >= 0:
                    raise VescaleError(f"{name}: expected {name} >= 0, got {group[name]}.")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping factors and roots in their own dtype (torch casts state to the parameter's)."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for name in STATES:
                if name in state_dict["state"].get(number, {}):
                    self.state[param][name] = state_dict["state"][number][name].clone()

    def matrices_of(self, name: str, param: Tensor, index: int) -> tuple[Matrix, ...]:
        matrices = super().matrices_of(name, param, index)
        return tuple(panel for matrix in matrices for panel in panels_of(matrix, self.max_preconditioner_dim))

    def cost(self, matrix: Matrix) -> int:
        """Products in every step, two eigendecompositions (about 10 K^3 each) every so often."""
        cost = 0
        for begin, end in column_blocks(matrix.columns, self.max_preconditioner_dim):
            rows, columns = matrix.rows, end - begin
            roots = 10 * (rows**3 + columns**3) // self.options.precondition_frequency
            cost += 4 * rows * columns * (rows + columns) + roots
        return cost

    def reorder(self, matrices: Sequence[Matrix], owners: Sequence[int], whole: Sequence[int | None]) -> Sequence[int]:
        """Owners that never descend along a parameter, so that what a rank owns is one run of the parameter's state."""
        by_tensor: dict[int, list[int]] = defaultdict(list)
        for number in sorted(range(len(matrices)), key=lambda number: matrices[number].begin):
            by_tensor[matrices[number].tensor].append(number)
        ordered = list(owners)
        for numbers in by_tensor.values():
            pinned = [whole[number] for number in numbers]
            ascending = _ascending([owners[number] for number in numbers], pinned)
            for number, owner in zip(numbers, ascending, strict=True):
                ordered[number] = owner
        return ordered

    def read(self, borrowed: Borrowed, runs: Sequence[Run]) -> list[Tensor]:
        return [run.of(borrowed.local_grad(run.matrix.tensor)) for run in runs]

    def compute(self, borrowed: Borrowed, matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        states = {index: self._states(borrowed, index) for index in {matrix.tensor for matrix in matrices}}
        return [
            self._panel(value, states[matrix.tensor][matrix.begin], self._step(borrowed, matrix.tensor))
            for matrix, value in zip(matrices, values, strict=True)
        ]

    def write(self, borrowed: Borrowed, runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        by_scale: dict[tuple[float, float, float, float], list[tuple[Run, Tensor]]] = defaultdict(list)
        for run, result in zip(runs, results, strict=True):
            group, step = borrowed.groups[run.matrix.tensor], self._step(borrowed, run.matrix.tensor)
            lr, beta1 = float(group["lr"]), group["beta1"]
            by_scale[lr, beta1, group["weight_decay"], 1 - beta1**step].append((run, result))
        for (lr, beta1, weight_decay, unbias), entries in by_scale.items():
            params = [run.of(borrowed.local(run.matrix.tensor)) for run, _ in entries]
            updates = [result for _, result in entries]
            if beta1:
                means = [run.of(self._mean(borrowed, run.matrix.tensor)) for run, _ in entries]
                foreach_lerp_(means, updates, 1 - beta1)
                updates = means
            foreach_mul_(params, 1 - lr * weight_decay)
            foreach_add_(params, updates, alpha=-lr / unbias)

    def conclude(self, borrowed: Borrowed, updated: Sequence[int]) -> None:
        for index in updated:
            self._step(borrowed, index)
            self._states(borrowed, index)
            if borrowed.groups[index]["beta1"]:
                self._mean(borrowed, index)
            self.state[borrowed.params[index]]["step"] += 1

    def _step(self, borrowed: Borrowed, index: int) -> int:
        """The number of the step under way, from 1."""
        state = self.state[borrowed.params[index]]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        return int(state["step"]) + 1

    def _mean(self, borrowed: Borrowed, index: int) -> Tensor:
        state = self.state[borrowed.params[index]]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(borrowed.params[index])
        return flat_local(state["exp_avg"], f"{borrowed.names[index]}: exp_avg")

    def _panel(self, value_MN: Tensor, states: Sequence[BlockState], step: int) -> Tensor:
        """The update of one owned panel; its blocks' states move on."""
        result_MN = torch.empty_like(value_MN)
        blocks = column_blocks(value_MN.size(1), self.max_preconditioner_dim)
        for (begin, end), state in zip(blocks, states, strict=True):
            result_MN[:, begin:end], new = precondition(value_MN[:, begin:end], state, step, self.options)
            for old_part, new_part in zip(state, new, strict=True):
                old_part.copy_(new_part)
        return result_MN

    def _states(self, borrowed: Borrowed, index: int) -> dict[int, list[BlockState]]:
        """Views of the state of the owned blocks, by the begin of their panel; zeros where there is none yet."""
        param, state = borrowed.params[index], self.state[borrowed.params[index]]
        layout = PanelStates.of(borrowed.lender.terms, index, borrowed.names[index], self.max_preconditioner_dim)
        if not layout.panels:
            return {}
        for name in STATES[: 3 if self.options.needs_square else 2]:
            if name not in state:
                state[name] = layout.zeros(name, param)
        return layout.views({name: state[name] for name in STATES if name in state})


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
