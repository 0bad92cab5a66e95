"""Muon: momentum whose whole matrices are orthogonalized, on parameters sharded in any way.

    optimizer = Muon(matrix_groups(model, lr=3e-4), lr=0.02, split={"attn.qkv.weight": (8, 4, 4)})

Arguments and semantics are torch.optim.Muon's. Every matrix is orthogonalized once, by the rank that owns it for the
step, so that results do not depend on the number of ranks. Follows K. Jordan et al., "Muon: An optimizer for hidden
layers in neural networks" (2024), and "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fsdp._torch import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_
from vescale_fsdp.errors import VescaleError

from .lend import BUCKET_NBYTES, Replicas, Run, flat_local
from .matrices import Matrix
from .optimizer import Borrowed, Group, MatrixOptimizer
from .orthogonalize import NewtonSchulz, adjusted_lr, orthogonalize_each

__all__ = ["Muon"]


class Muon(MatrixOptimizer):
    """torch.optim.Muon for sharded parameters, with stacks, convolutions, fused matrices and an AdamW partner.

    params, lr .. adjust_lr_fn: as in torch.optim.Muon. A group with `"algorithm": "adamw"` takes torch.optim.AdamW's
        options `lr, betas, eps, weight_decay` and its defaults.
    iteration_dtype: of Newton-Schulz, and of what travels. torch.optim.Muon's is bfloat16.
    split, flatten, bucket_nbytes, replicas: see `MatrixOptimizer`.

    The state of a matrix parameter is `momentum_buffer`, with the parameter's placements.

    Raises VescaleError (a ValueError) for parameters with fewer than two dims in a Muon group, and on every rank when
    a gradient is missing on some ranks only.
    """

    algorithm = "muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NewtonSchulz.coefficients,
        eps: float = NewtonSchulz.eps,
        ns_steps: int = NewtonSchulz.steps,
        adjust_lr_fn: str | None = None,
        *,
        iteration_dtype: torch.dtype = NewtonSchulz.dtype,
        split: Mapping[str, Sequence[int]] | None = None,
        flatten: Collection[str] = (),
        bucket_nbytes: int = BUCKET_NBYTES,
        replicas: Replicas = Replicas.REPEAT,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "iteration_dtype": str(iteration_dtype).removeprefix("torch."),  # full state dicts take no torch.dtype
        }
        super().__init__(params, defaults, split=split, flatten=flatten, bucket_nbytes=bucket_nbytes, replicas=replicas)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] == self.algorithm:
            _check_options(group)

    def travel_dtype(self, param: Tensor, group: Group) -> torch.dtype:
        return _iteration(group).dtype

    def prepare(self, borrowed: Borrowed, present: Sequence[int]) -> None:
        by_group: dict[int, list[int]] = defaultdict(list)
        for index in present:
            by_group[id(borrowed.groups[index])].append(index)
        for indices in by_group.values():
            grads = [borrowed.local_grad(index) for index in indices]
            buffers = [self._momentum(borrowed, index) for index in indices]
            foreach_lerp_(buffers, grads, 1 - borrowed.groups[indices[0]]["momentum"])

    def read(self, borrowed: Borrowed, runs: Sequence[Run]) -> list[Tensor]:
        updates = [run.of(self._momentum(borrowed, run.matrix.tensor)) for run in runs]
        for group, positions in borrowed.by_group(runs):
            if not group["nesterov"]:
                continue
            grads = [runs[i].of(borrowed.local_grad(runs[i].matrix.tensor)) for i in positions]
            ahead = foreach_lerp(grads, [updates[i] for i in positions], group["momentum"])
            for position, update in zip(positions, ahead, strict=True):
                updates[position] = update
        return updates

    def compute(self, borrowed: Borrowed, matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        by_iteration: dict[NewtonSchulz, list[int]] = defaultdict(list)
        for position, matrix in enumerate(matrices):
            by_iteration[_iteration(borrowed.groups[matrix.tensor])].append(position)
        results = list(values)
        for iteration, positions in by_iteration.items():
            done = orthogonalize_each([values[i] for i in positions], iteration)
            for position, result in zip(positions, done, strict=True):
                results[position] = result
        return results

    def write(self, borrowed: Borrowed, runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        for group, positions in borrowed.by_group(runs):
            lr = float(group["lr"])
            params = {i: runs[i].of(borrowed.local(runs[i].matrix.tensor)) for i in positions}
            foreach_mul_(list(params.values()), 1 - lr * group["weight_decay"])
            by_rate: dict[float, list[int]] = defaultdict(list)
            for i in positions:
                by_rate[adjusted_lr(lr, group["adjust_lr_fn"], runs[i].matrix.shape)].append(i)
            for rate, same in by_rate.items():
                foreach_add_([params[i] for i in same], [results[i] for i in same], alpha=-rate)

    def conclude(self, borrowed: Borrowed, updated: Sequence[int]) -> None:
        for index in updated:
            self._momentum(borrowed, index)

    def _momentum(self, borrowed: Borrowed, index: int) -> Tensor:
        param, state = borrowed.params[index], self.state[borrowed.params[index]]
        if "momentum_buffer" not in state:
            dtype = param.dtype if param.grad is None else param.grad.dtype
            state["momentum_buffer"] = torch.zeros_like(param, dtype=dtype)
        return flat_local(state["momentum_buffer"], f"{borrowed.names[index]}: momentum_buffer")


def _iteration(group: Group) -> NewtonSchulz:
    dtype = group["iteration_dtype"]
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return NewtonSchulz(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], dtype)


def _check_options(group: Group) -> None:
    _iteration(group)
    adjusted_lr(0.0, group["adjust_lr_fn"], (1, 1))
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise VescaleError(f"lr: expected a tensor of one element, got shape {tuple(group['lr'].shape)}.")
    for name in ("lr", "momentum", "weight_decay"):
        if not float(group[name]) >= 0:
            raise VescaleError(f"{name}: expected {name} >= 0, got {group[name]}.")
