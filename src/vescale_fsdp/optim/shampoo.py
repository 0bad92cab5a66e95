"""Shampoo in blocks, with grafting, on parameters sharded in any way.

    optimizer = Shampoo(matrix_groups(model, lr=3e-4), lr=1e-3, max_preconditioner_dim=1024, precondition_frequency=10)

A matrix is cut into blocks of at most `max_preconditioner_dim` rows and columns; see `PanelOptimizer`. Every block is
preconditioned once, by its owner, so that results do not depend on the number of ranks.

State of a parameter, all DTensors, so that checkpoints reshard them like any other:

    step        how many steps, a plain tensor
    exp_avg     the parameter's shape and placements (absent when beta1 = 0)
    factors     1-d: for each panel in memory order and each of its blocks, L (M, M) and then R (N, N)
    roots       1-d, in the same order: L^(-1/4) and R^(-1/4)
    square      1-d: for each panel and block, the grafted method's second moment (M, N) (absent where it has none)

The 1-d tensors have a RaggedShard over each axis along which matrices travel: a rank holds the panels that it owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fsdp._torch import foreach_add_, foreach_lerp_, foreach_mul_
from vescale_fsdp.errors import VescaleError

from .lend import BUCKET_NBYTES, Replicas, Run, flat_local
from .optimizer import Borrowed, Group
from .panel_state import BlockViews, Kind
from .panels import PanelOptimizer
from .preconditioner import BlockState, Grafting, ShampooOptions, precondition

__all__ = ["Shampoo"]


class Shampoo(PanelOptimizer):
    """Shampoo whose blocks are preconditioned by the ranks that own them.

    lr, beta1, weight_decay: learning rate; decay of the mean of the preconditioned updates, bias-corrected; decoupled
        weight decay. These three may differ between parameter groups, the others are the optimizer's.
    beta2, epsilon, precondition_frequency, start_preconditioning_step, grafting, grafting_epsilon: `ShampooOptions`.
    max_preconditioner_dim: the largest block.
    split, flatten, bucket_nbytes, replicas: see `MatrixOptimizer`. A group with `"algorithm": "adamw"` is stepped by
        AdamW.
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
        replicas: Replicas = Replicas.REPEAT,
    ) -> None:
        self.options = ShampooOptions(
            beta2, epsilon, precondition_frequency, start_preconditioning_step, grafting, grafting_epsilon
        )
        self.kinds = {"factors": Kind.SIDES, "roots": Kind.SIDES}
        if self.options.needs_square:
            self.kinds["square"] = Kind.BLOCK
        defaults = {"lr": lr, "beta1": beta1, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults,
            max_block_dim=max_preconditioner_dim,
            split=split,
            flatten=flatten,
            bucket_nbytes=bucket_nbytes,
            replicas=replicas,
        )

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not 0 <= group["beta1"] < 1:
            raise VescaleError(f"beta1: expected 0 <= beta1 < 1, got {group['beta1']}.")

    def block_cost(self, rows: int, columns: int) -> int:
        """Products in every step, two eigendecompositions (about 10 K^3 each) every so often."""
        roots = 10 * (rows**3 + columns**3) // self.options.precondition_frequency
        return 4 * rows * columns * (rows + columns) + roots

    def update(self, grad_MN: Tensor, views: BlockViews, step: int) -> Tensor:
        (left, right), (left_root, right_root) = views["factors"], views["roots"]
        (square,) = views.get("square", (grad_MN,))
        state = BlockState(left, right, left_root, right_root, square)
        update_MN, new = precondition(grad_MN, state, step, self.options)
        for old_part, new_part in zip(state[: 5 if "square" in views else 4], new, strict=False):
            old_part.copy_(new_part)
        return update_MN

    def apply(self, borrowed: Borrowed, group: Group, runs: Sequence[Run], updates: Sequence[Tensor]) -> None:
        lr, beta1 = float(group["lr"]), group["beta1"]
        params = [run.of(borrowed.local(run.matrix.tensor)) for run in runs]
        foreach_mul_(params, 1 - lr * group["weight_decay"])
        if beta1:
            means = [run.of(self._mean(borrowed, run.matrix.tensor)) for run in runs]
            foreach_lerp_(means, [update.to(means[0].dtype) for update in updates], 1 - beta1)
            updates = means
        by_step: dict[int, list[int]] = defaultdict(list)
        for position, run in enumerate(runs):
            by_step[self.step_number(borrowed, run.matrix.tensor)].append(position)
        for step, same in by_step.items():
            foreach_add_([params[i] for i in same], [updates[i] for i in same], alpha=-lr / (1 - beta1**step))

    def conclude(self, borrowed: Borrowed, updated: Sequence[int]) -> None:
        super().conclude(borrowed, updated)
        for index in updated:
            if borrowed.groups[index]["beta1"]:
                self._mean(borrowed, index)

    def _mean(self, borrowed: Borrowed, index: int) -> Tensor:
        state = self.state[borrowed.params[index]]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(borrowed.params[index])
        return flat_local(state["exp_avg"], f"{borrowed.names[index]}: exp_avg")
