"""Programs written for FSDP2, with only the import changed: the same losses, the same collectives, the same names."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

import vescale_fsdp
from vescale_fsdp.state import find_state


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = (w(x).view(size, length, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(size, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int = 16, heads: int = 2, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.pos_embeddings = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()


def tutorial(fsdp: ModuleType, *, mixed_precision: bool) -> tuple[list[float], dict[str, int], list[str]]:
    """The steps of PyTorch's FSDP2 tutorial: shard layers and root, prefetch two ahead, clip, Adam."""
    torch.manual_seed(0)
    model = Transformer(vocabulary=64)
    kwargs = {}
    if mixed_precision:
        kwargs["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fsdp.fully_shard(layer, **kwargs)
    fsdp.fully_shard(model, **kwargs)
    for index, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 3]))
        layer.set_modules_to_backward_prefetch(list(model.layers[max(index - 2, 0) : index][::-1]))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        model.unshard(async_op=True)
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with CommDebugMode() as mode:
            loss = model(tokens).sum() * 1e-3
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses, {str(op): count for op, count in mode.comm_counts.items()}, [n for n, _ in model.named_parameters()]


@ranks(2)
def test_the_fsdp2_tutorial_gives_the_same_losses_collectives_and_names() -> None:
    for mixed_precision in (False, True):
        ours = tutorial(vescale_fsdp, mixed_precision=mixed_precision)
        theirs = tutorial(torch_fsdp, mixed_precision=mixed_precision)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5 if mixed_precision else 1e-6, atol=1e-6)
        assert ours[1:] == theirs[1:]


def decoder(fsdp: ModuleType) -> list[float]:
    """A causal language model as Hugging Face's trainers wrap it: odd vocabulary, tied head, layers one by one."""
    torch.manual_seed(1)
    model = Transformer(vocabulary=101, tied=True)
    for layer in model.layers:
        fsdp.fully_shard(layer, reshard_after_forward=True)
    fsdp.fully_shard(model, reshard_after_forward=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 101, (2, 13), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert model.output.weight is model.tok_embeddings.weight
    return losses


@ranks(2)
def test_a_decoder_with_tied_embeddings_and_an_odd_vocabulary_trains_as_under_fsdp2() -> None:
    assert decoder(vescale_fsdp) == decoder(torch_fsdp)


@ranks(2)
def test_implicit_prefetch_keeps_no_more_groups_gathered_than_fsdp2s_schedule_needs() -> None:
    model = Tower(depth=5)
    for block in model.blocks:
        vescale_fsdp.fully_shard(block)
    vescale_fsdp.fully_shard(model)
    groups = [find_state(block).groups[0] for block in model.blocks]
    alive: list[int] = []

    def count(*_: object) -> None:
        alive.append(sum(group.is_unsharded or group._pending is not None for group in groups))

    for block in model.blocks:
        block.down.register_forward_hook(count)
        block.down.register_full_backward_hook(count)
    model(batch(0, 2)).sum().backward()
    assert max(alive[:5]) == 1  # forward: the running block
    assert max(alive[5:]) == 2  # backward: the running block and the one that comes next


@ranks(2)
def test_a_pipeline_schedule_drives_wrapped_stages() -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    reference = nn.Sequential(*stages)
    x, target = batch(0, 1, per_rank=8), batch(1, 1, per_rank=8)
    F.mse_loss(reference(x), target).backward()
    expected = [stage[0].weight.grad.clone() for stage in stages]
    mine = {index: stage for index, stage in enumerate(stages) if index % 2 == rank}
    for stage in mine.values():
        stage.zero_grad()
        vescale_fsdp.fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    parts = [
        PipelineStage(stage, index, 4, torch.device("cpu"), group=mesh["pp"].get_group())
        for index, stage in mine.items()
    ]
    schedule = ScheduleInterleaved1F1B(parts, 4, loss_fn=F.mse_loss)
    schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
    for index, stage in mine.items():
        torch.testing.assert_close(stage[0].weight.grad.full_tensor(), expected[index])
