"""The models that engines are compared on, and the ways to wrap them: ours, FSDP2, FSDP1, Megatron-FSDP, plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import no_cuda_streams
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from vescale_fsdp import ExchangeReduceScatter, FSDPModule, fully_shard, fuse_gradient_accumulation
from vescale_fsdp.optim import flat


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    experts: int = 0


SIZES = {
    "a": Size(24, 64, 4, 256, 512, 16),  # many small tensors: Python decides
    "b": Size(8, 640, 10, 2560, 14336, 16),  # many bytes, few tokens: copies and collectives decide
    "c6": Size(4, 256, 4, 512, 2048, 16, experts=6),  # fused experts that 4 ranks do not divide
    "c3": Size(4, 256, 4, 512, 2048, 16, experts=3),  # fewer experts than ranks
    "d": Size(4, 195, 5, 781, 50257, 17),  # odd sizes
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        texts, length, width = x.shape
        q, k, v = self.qkv(x).view(texts, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(texts, length, width))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """All experts in two weights; every token visits every expert, so that all ranks do the same work."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts)
        self.w13 = nn.Parameter(torch.randn(size.experts, 2 * size.hidden, size.width) * size.width**-0.5)
        self.b13 = nn.Parameter(torch.zeros(size.experts, 2 * size.hidden))
        self.w2 = nn.Parameter(torch.randn(size.experts, size.width, size.hidden) * size.hidden**-0.5)
        self.b2 = nn.Parameter(torch.zeros(size.experts, size.width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).expand(self.w13.shape[0], -1, -1)
        gate, up = torch.baddbmm(self.b13.unsqueeze(1), tokens, self.w13.transpose(1, 2)).chunk(2, -1)
        y = torch.baddbmm(self.b2.unsqueeze(1), F.silu(gate) * up, self.w2.transpose(1, 2))
        weight = self.router(x).flatten(0, 1).softmax(-1)
        return (y * weight.t().unsqueeze(-1)).sum(0).view_as(x)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        dense = nn.Sequential(nn.Linear(size.width, size.hidden), nn.GELU(), nn.Linear(size.hidden, size.width))
        self.mlp = Experts(size) if size.experts else dense

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Returns the loss of a text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.embed_place = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.embed(inputs) + self.embed_place(torch.arange(inputs.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def build(size: Size, device: str = "cpu") -> GPT:
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(size)


def text(size: Size, step: int, rank: int, texts: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, size.vocabulary, (texts, size.length + 1), generator=random)


@dataclass(frozen=True)
class Policy:
    """`bf16`: parameters are gathered in bfloat16; `bf16r`: gradients are reduced in it, too."""

    precision: str = "fp32"
    reshards: bool = True

    @property
    def reduce_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16r" else torch.float32


Wrapped = tuple[nn.Module, torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def wrap_plain(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    """No sharding and no communication: what computing costs."""
    if policy.precision != "fp32":
        model.to(torch.bfloat16)
    return model, adamw(model)


def wrap_ours(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    _by_block(fully_shard, model, mesh, policy)
    return model, adamw(model)


def wrap_ours_flat(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    model, optimizer = wrap_ours(model, mesh, policy)
    return model, flat(optimizer, model)


def wrap_fsdp2(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    _by_block(fsdp2, model, mesh, policy)
    return model, adamw(model)


def _by_block(shard: Callable[..., Any], model: GPT, mesh: DeviceMesh, policy: Policy) -> None:
    options: dict[str, Any] = {"mesh": mesh}
    if policy.precision != "fp32":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=policy.reduce_dtype)
    if not policy.reshards:
        options["reshard_after_forward"] = False
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)


def wrap_fsdp1(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=policy.reduce_dtype)
    wrapped = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        use_orig_params=True,
        mixed_precision=None if policy.precision == "fp32" else mixed,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.FULL_SHARD if policy.reshards else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    return wrapped, adamw(wrapped)


def wrap_ours_opted_in(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    """With all that is off by default: the flat step, fused weight gradients where nothing casts them, the in-place
    collective of gloo, one gather ahead in forward."""
    model, optimizer = wrap_ours_flat(model, mesh, policy)
    if policy.precision != "bf16":
        fuse_gradient_accumulation(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            module.set_custom_reduce_scatter(ExchangeReduceScatter())
    model.set_num_modules_to_forward_prefetch(1)
    return model, optimizer


def wrap_megatron(model: GPT, mesh: DeviceMesh, policy: Policy) -> Wrapped:
    """Megatron-FSDP's `experimental` engine, which knows streams of CUDA alone."""
    no_cuda_streams.install()
    from megatron_fsdp.experimental import fully_shard as shard
    from megatron_fsdp.experimental.optimizer import fully_shard_optimizer
    from megatron_fsdp.experimental.placement import Flat, Placements
    from megatron_fsdp.mixed_precision import MixedPrecisionPolicy as Mixed

    mixed = None
    if policy.precision != "fp32":
        model, mixed = model.to(torch.bfloat16), Mixed(main_params_dtype=torch.float32)
    placements = Placements(dp_axes=[0], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
    for module in (*model.blocks, model):
        shard(module, mesh, placements, mixed_precision_policy=mixed)
    optimizer = adamw(model)
    fully_shard_optimizer(optimizer)
    return model, optimizer


def why_not(engine: str, policy: Policy) -> str:
    """Why an engine cannot run a case; nothing if it can."""
    if engine != "megatron":
        return ""
    if find_spec("megatron_fsdp") is None or find_spec("einops") is None:
        return "not installed: pip install einops && pip install --no-deps megatron-fsdp==0.6.1"
    if not policy.reshards:
        return "it always reshards after forward"
    return "it reduces in the dtype of its parameters" if policy.precision == "bf16" else ""


ENGINES: dict[str, Callable[[GPT, DeviceMesh, Policy], Wrapped]] = {
    "fsdp2": wrap_fsdp2,
    "ours": wrap_ours,
    "ours, flat": wrap_ours_flat,
    "ours, all": wrap_ours_opted_in,
    "fsdp1": wrap_fsdp1,
    "megatron": wrap_megatron,
    "plain": wrap_plain,
}
