"""A byte-level GPT: rotary positions, RMSNorm before each half of a block, no biases.

Shape suffixes: B sequences, T bytes, D model dim, H heads, K dim of a head, V = 256 byte values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_fsdp.demo.settings import Settings

__all__ = ["GPT", "Block", "generate", "make_model"]

NUM_BYTES = 256
INIT_STD = 0.02


class Block(nn.Module):
    """Attention, then a feed-forward of four times the width; each reads a normalised copy of the residual stream."""

    def __init__(self, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        self.angles_TK = _angles(seq, dim // heads)  # a constant, not a buffer: DDP would broadcast it every step

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD))
        hidden: Tensor = self.down(F.gelu(self.up(self.ffn_norm(x_BTD))))
        return x_BTD + hidden

    def _attend(self, x_BTD: Tensor) -> Tensor:
        batch, seq, dim = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = self.qkv(x_BTD).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        angles_TK = self.angles_TK[:seq]
        q_BHTK, k_BHTK = _rotated(q_BHTK, angles_TK), _rotated(k_BHTK, angles_TK)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        projected: Tensor = self.out(mixed_BHTK.transpose(1, 2).reshape(batch, seq, dim))
        return projected


def _angles(seq: int, head_dim: int) -> Tensor:
    """How far each pair of a head's numbers turns at each position: (T, K / 2)."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return torch.outer(torch.arange(seq), frequencies)


def _rotated(x_BHTK: Tensor, angles_TK: Tensor) -> Tensor:
    """Rotary positions: the first and second half of K are the two coordinates of a point that turns."""
    a, b = x_BHTK.chunk(2, dim=-1)
    cos, sin = angles_TK.cos(), angles_TK.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x_BHTK.dtype)


class GPT(nn.Module):
    """Next-byte logits (B, T, V) for bytes (B, T), T at most `seq`."""

    def __init__(self, *, layers: int, dim: int, heads: int, seq: int, tied: bool) -> None:
        super().__init__()
        self.seq = seq
        self.embed = nn.Embedding(NUM_BYTES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, seq) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, NUM_BYTES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, bytes_BT: Tensor) -> Tensor:
        x_BTD = self.embed(bytes_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def make_model(settings: Settings) -> GPT:
    """The model with the values that `settings.seed` gives, whatever the number of ranks."""
    s = settings
    model = GPT(layers=s.layers, dim=s.dim, heads=s.heads, seq=s.seq, tied=s.tied)
    generator = torch.Generator().manual_seed(s.seed)
    residual_std = INIT_STD / (2 * s.layers) ** 0.5
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            if param.ndim > 1:
                ends_residual = fqn.endswith(("out.weight", "down.weight"))
                param.normal_(std=residual_std if ends_residual else INIT_STD, generator=generator)
    return model


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, seed: int, temperature: float = 0.7) -> bytes:
    """`prompt` and `count` sampled bytes."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window_1T = torch.tensor([text[-model.seq :]])
        logits_V = model(window_1T)[0, -1].float()
        text.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
    return bytes(text)
