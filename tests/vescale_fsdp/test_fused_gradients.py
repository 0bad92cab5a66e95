"""Weight gradients that are written where they are reduced: the same bits, no copy, and everything else as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import TinyDecoder, Tower, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import MixedPrecisionPolicy, VescaleError, fully_shard, fuse_gradient_accumulation, traffic


class Twice(nn.Module):
    """Uses each block twice in one forward, on 3-D inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(out=8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return self.tower(x) + self.tower(x.flip(0))


class Checkpointed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Mapped(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.head)(self.blocks[0](self.embed(x)))


class Words(nn.Module):
    """An embedding with padding, tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(7).long() % 11
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Untied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(11, 6))


def frozen(model: nn.Module) -> nn.Module:
    model.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr,index]
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "linear": (Tower, True),
    "frozen": (lambda: frozen(Tower()), True),
    "checkpointed": (Checkpointed, True),
    "embedding": (Untied, True),
    "used twice, 3-D": (Twice, False),
    "tied": (Words, False),
}
"""The model, and whether bits are promised."""


def wrapped(kind: Callable[[], nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for block in getattr(getattr(model, "tower", model), "blocks", ()):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def train(model: Any, *, accumulates: bool = False) -> list[Tensor]:
    """The gradients of two reductions, with a backward before each that does not reduce, or without."""
    grads = []
    for step in range(4 if accumulates else 2):
        model.set_requires_gradient_sync(not accumulates or step % 2 == 1)
        model(batch(step, dist.get_world_size(), dist.get_rank())).square().mean().backward()
        grads += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
        if not accumulates or step % 2 == 1:
            model.zero_grad()
    return grads


def assert_alike(mine: list[Tensor], theirs: list[Tensor], *, bits: bool) -> None:
    assert len(mine) == len(theirs) > 0
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, **({"rtol": 0, "atol": 0} if bits else {}))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", MODELS)
@ranks(2, 3)
def test_gradients_are_those_of_the_usual_step(name: str, accumulates: bool) -> None:
    kind, bits = MODELS[name]
    usual, fused = wrapped(kind), wrapped(kind)
    fuse_gradient_accumulation(fused)
    mine, theirs = (train(model, accumulates=accumulates) for model in (fused, usual))
    assert_alike(mine, theirs, bits=bits and not accumulates)


@ranks(2)
def test_of_fused_weights_nothing_is_copied() -> None:
    for kind in (Tower, Untied, Words):
        model = wrapped(kind)
        fused = fuse_gradient_accumulation(model)
        train(model)
        before = traffic(model)
        train(model)
        params = dict(model.named_parameters())
        others = [param for name, param in params.items() if name not in fused.weights]
        assert len(others) < len(params)
        assert (traffic(model) - before).copied_bytes == 2 * sum(4 * param.numel() for param in others)


@ranks(4)
def test_replicas_sum_fused_gradients() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    usual, fused = wrapped(Tower, mesh=mesh), wrapped(Tower, mesh=mesh)
    fuse_gradient_accumulation(fused)
    assert_alike(train(fused), train(usual), bits=True)


@ranks(2)
def test_a_language_model_trains_alike() -> None:
    usual, fused = wrapped(TinyDecoder), wrapped(TinyDecoder)
    assert "embed.weight" in fuse_gradient_accumulation(fused).weights
    tokens = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in (usual, fused):
        model(tokens).square().mean().backward()
    for mine, theirs in zip(fused.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local())  # type: ignore[union-attr]


@ranks(2)
def test_gradients_of_inputs_alone_leave_no_weight_gradient() -> None:
    usual, fused = wrapped(Tower), wrapped(Tower)
    fuse_gradient_accumulation(fused)
    for model in (usual, fused):
        x = batch(0, 2, dist.get_rank()).requires_grad_()
        torch.autograd.grad(model(x).square().mean(), x)
        assert all(param.grad is None for param in model.parameters())
    assert_alike(train(fused), train(usual), bits=True)


@ranks(2)
def test_autocast_and_functorch_run_as_before() -> None:
    usual, fused = wrapped(Tower), wrapped(Tower)
    fuse_gradient_accumulation(fused)
    for model in (usual, fused):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch(0, 2, dist.get_rank())).float().square().mean().backward()
    for mine, theirs in zip(fused.parameters(), usual.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())  # type: ignore[union-attr]
    usual, fused = wrapped(Mapped), wrapped(Mapped)
    fuse_gradient_accumulation(fused)
    assert_alike(train(fused), train(usual), bits=True)


@ranks(2)
def test_a_second_derivative_raises() -> None:
    model = wrapped(Tower)
    fuse_gradient_accumulation(model)
    x = batch(0, 2, dist.get_rank()).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@ranks(2)
def test_a_step_without_reduction_of_fused_gradients_raises() -> None:
    class Hidden(Tower):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            self.out = super().forward(x)

    model: Any = Hidden()
    fully_shard(model)  # as one unit, so that no wrapped module's output is seen
    fuse_gradient_accumulation(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 2, dist.get_rank()))
    model.out.square().mean().backward()
    with pytest.raises(VescaleError, match=r"gradients of .*head.weight.* were not reduced"):
        optim.step()


@ranks(1, 2)
def test_models_without_such_a_layer_are_refused_and_remove_undoes() -> None:
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [nn.Linear(4, 4), wrapped(Tower, mp_policy=wide), wrapped(Tower)]
    for model in models[: 3 if dist.get_world_size() == 1 else 2]:
        with pytest.raises(VescaleError, match=r"no layer to fuse\. Wrap the model with fully_shard first"):
            fuse_gradient_accumulation(model)
    if dist.get_world_size() == 2:
        usual, model = copy.deepcopy(Tower()), models[2]
        fused = fuse_gradient_accumulation(model)
        assert len(fused.weights) == 6
        fused.remove()
        assert fused.weights == ()
        assert all("forward" not in vars(module) for module in (*usual.modules(), *model.modules()))


class Hooked(Tower):
    """Registers a hook on the gathered weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.register_hook(lambda grad: grad * 2)
        return super().forward(x)


def complex_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4, dtype=torch.cfloat), nn.Linear(4, 3, dtype=torch.cfloat))


@pytest.mark.parametrize("kind", [Hooked, complex_layers])
@ranks(2)
def test_complex_weights_and_weights_with_hooks_have_the_usual_gradients(kind: Callable[[], nn.Module]) -> None:
    found = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        model = kind()
        fully_shard(model)
        if is_fused:
            fuse_gradient_accumulation(model)
        x = batch(0, 2, dist.get_rank()).to(next(model.parameters()).dtype)
        model(x).abs().square().mean().backward()
        found.append([param.grad.to_local() for param in model.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *found))
