"""GPTs in the shapes that engines are compared on: dense, fused experts that do not divide, odd sizes; all small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int = 4
    experts: int = 0


SHAPES = {
    "many_layers": Shape(12, 32, 4, 128, 64),
    "wide": Shape(2, 96, 6, 384, 448),
    "five_experts": Shape(2, 32, 4, 64, 128, experts=5),
    "six_experts": Shape(2, 32, 4, 64, 128, experts=6),
    "one_expert": Shape(2, 32, 4, 64, 128, experts=1),
    "three_experts": Shape(2, 32, 4, 64, 128, experts=3),
    "odd": Shape(2, 35, 5, 141, 1257),
    "tiny": Shape(2, 32, 2, 64, 64),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(size, length, width))


class Experts(nn.Module):
    """All experts in two tensors, as GPT-OSS and DeepSeek fuse them; every token visits every expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts)
        self.w13 = nn.Parameter(torch.randn(shape.experts, 2 * shape.hidden, shape.width) * shape.width**-0.5)
        self.b13 = nn.Parameter(torch.zeros(shape.experts, 2 * shape.hidden))
        self.w2 = nn.Parameter(torch.randn(shape.experts, shape.width, shape.hidden) * shape.hidden**-0.5)
        self.b2 = nn.Parameter(torch.zeros(shape.experts, shape.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1).expand(self.w13.shape[0], -1, -1)
        gate, up = torch.baddbmm(self.b13.unsqueeze(1), tokens, self.w13.transpose(1, 2)).chunk(2, -1)
        y = torch.baddbmm(self.b2.unsqueeze(1), F.silu(gate) * up, self.w2.transpose(1, 2))
        weight = self.router(x).flatten(0, 1).softmax(-1)
        return (y * weight.t().unsqueeze(-1)).sum(0).view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        dense = nn.Sequential(nn.Linear(shape.width, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.width))
        self.mlp = Experts(shape) if shape.experts else dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """Of the rank's batch of the step: one text."""
        random = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(0, self.shape.vocabulary, (1, self.shape.length + 1), generator=random)
        return F.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
