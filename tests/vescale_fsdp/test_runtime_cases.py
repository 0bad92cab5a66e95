"""Reports from the field, each as the smallest model that shows it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn

from vescale_fsdp import fully_shard


class TiedRows(nn.Module):
    """Five rows, which two ranks share 3 and 2, used as embedding and as output layer (pytorch#176076)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@ranks(2, 3)
def test_every_row_of_an_uneven_tied_weight_trains_like_the_reference() -> None:
    reference = TiedRows()
    model = fully_shard(copy.deepcopy(reference))
    start = reference.embed.weight.detach().clone()
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        tokens = torch.randint(0, 5, (num_ranks, 6), generator=torch.Generator().manual_seed(step))
        for each, optim, part in zip((model, reference), optims, (tokens[rank : rank + 1], tokens), strict=True):
            nn.functional.cross_entropy(each(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
            optim.step()
            optim.zero_grad()
    trained = model.embed.weight.full_tensor()
    for row in range(5):
        torch.testing.assert_close(trained[row], reference.embed.weight.detach()[row])
        assert not torch.equal(trained[row], start[row])
