"""A user program about optimizers, checked by mypy --strict and never run."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import assert_type

import torch
from torch import Tensor, nn

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import (
    BlockViews,
    Borrowed,
    Kind,
    Lender,
    Matrix,
    MatrixOptimizer,
    Muon,
    Ownership,
    PanelOptimizer,
    Replicas,
    Run,
    Shampoo,
    lend,
    matrices_of,
    matrix_groups,
    select_owners,
    whole_matrices,
)

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(model, param_policy=whole_matrices(model, num_ranks=4))

muon = Muon(
    matrix_groups(model, lr=3e-4),
    lr=0.02,
    adjust_lr_fn="match_rms_adamw",
    split={"0.weight": (4, 2, 2)},
    iteration_dtype=torch.float32,
    replicas=Replicas.SHARE,
)
shampoo = Shampoo(
    model.named_parameters(), lr=1e-3, max_preconditioner_dim=512, grafting="rmsprop", replicas=Replicas.SHARE
)
optimizers: list[torch.optim.Optimizer] = [muon, shampoo]
assert_type(muon.explain(), str)
assert_type(matrices_of((8, 4), split=(4, 4)), tuple[Matrix, ...])
assert_type(select_owners([3, 2, 1], 2), Ownership)
assert_type(select_owners([3, 2, 1], 2).max_load, int)


def doubled(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
    return [2 * value for value in values]


lend([torch.zeros(4, 4)], doubled, bucket_nbytes=1 << 20)
assert_type(Lender([torch.zeros(4, 4)]).num_buckets, int)


class Sketch(MatrixOptimizer):
    algorithm = "sketch"

    def read(self, borrowed: Borrowed, runs: Sequence[Run]) -> list[Tensor]:
        return [run.of(borrowed.local_grad(run.matrix.tensor)) for run in runs]

    def compute(self, borrowed: Borrowed, matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        return doubled(matrices, values)

    def write(self, borrowed: Borrowed, runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        for run, result in zip(runs, results, strict=True):
            run.of(borrowed.local(run.matrix.tensor)).sub_(result)


Sketch(model.parameters(), {"lr": 0.1}).step()


class Whitened(PanelOptimizer):
    algorithm = "whitened"
    kinds = MappingProxyType({"left": Kind.SIDES})

    def update(self, grad_MN: Tensor, views: BlockViews, step: int) -> Tensor:
        left_MM, _ = views["left"]
        left_MM.lerp_(grad_MN @ grad_MN.mT, 1 / step)
        return grad_MN / (1 + left_MM.trace())


Whitened(model.parameters(), {"lr": 0.1, "weight_decay": 0.0}, max_block_dim=256, replicas=Replicas.REPEAT).step()
