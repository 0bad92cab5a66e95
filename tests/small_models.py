"""Small models that tests train: even and uneven sizes, nested blocks, tied and frozen parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual two-layer perceptron with a norm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks between an input and an output layer."""

    def __init__(self, width: int = 8, hidden: int = 16, depth: int = 2, out: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Odd(nn.Module):
    """Sizes that no number of ranks divides: a scalar, one element, fewer rows than ranks, a 5-D convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((1,), 0.25))
        self.conv = nn.Conv3d(1, 3, 2)
        self.mix = nn.Linear(3, 7)
        self.out = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cubes = x.reshape(-1, 1, 2, 2, 2) * self.scale + self.shift
        return self.out(torch.tanh(self.mix(self.conv(cubes).flatten(1))))


class TinyDecoder(nn.Module):
    """A causal language model over 101 tokens with tied embeddings."""

    def __init__(self, vocabulary: int = 101, width: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def batch(step: int, num_ranks: int, rank: int | None = None, *, per_rank: int = 4, width: int = 8) -> torch.Tensor:
    """The inputs of a step: of all ranks together, or of one."""
    whole = torch.randn(per_rank * num_ranks, width, generator=torch.Generator().manual_seed(1000 + step))
    return whole if rank is None else whole[rank * per_rank : (rank + 1) * per_rank]
