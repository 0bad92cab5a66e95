"""What is for speed and memory: optimizers on flat shards, fused gradients, reductions on gloo, the report."""

from typing import assert_type

import torch
from torch import nn

from vescale_fsdp import (
    ExchangeReduceScatter,
    FSDPModule,
    InPlaceReduceScatter,
    fully_shard,
    fuse_gradient_accumulation,
    report,
)
from vescale_fsdp.optim import flat

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
sharded = fully_shard(model)
assert_type(flat(torch.optim.AdamW(model.parameters()), model), torch.optim.Optimizer)

fused = fuse_gradient_accumulation(model)
assert_type(fused.weights, tuple[str, ...])
fused.remove()

for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_custom_reduce_scatter(ExchangeReduceScatter())
        module.set_custom_reduce_scatter(InPlaceReduceScatter())

assert_type(report(model).reserved_nbytes, int | None)
assert_type(report(model).peak_nbytes_bound, int | None)
