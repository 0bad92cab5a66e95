"""Weight gradients that their own matrix product writes into the input of the reduction: nothing is left to copy.

Autograd hands over each gradient in a tensor of its own, which has to be copied once. Layers that are fused compute
theirs straight into the buffer that their group reduces (Megatron's `gradient_accumulation_fusion`, for any backend).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import _torch
from .errors import VescaleError
from .group.param_group import ParamGroup
from .state import find_state

__all__ = ["FusedGradients", "fuse_gradient_accumulation"]


class FusedGradients:
    """The layers of a model whose weight gradients are fused; `remove` gives them their own forward back."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of their weights."""
        return tuple(self._modules)

    def remove(self) -> None:
        for module in self._modules.values():
            vars(module).pop("forward", None)
        self._modules = {}


def fuse_gradient_accumulation(model: nn.Module) -> FusedGradients:
    """Let the weight gradients of linear and embedding layers of `model`, which `fully_shard` wrapped, be written where
    they are reduced.

    Fused is each `nn.Linear` and `nn.Embedding` that computes as torch's own does, with a plain weight that is reduced
    in the dtype of computation, over more than one rank. While frozen, under autocast, functorch or torch.compile, and
    for inputs of another kind or dtype, or complex ones, it runs as before. Backward through its backward raises.

    Bits are those of the usual step where a weight is used once between two reductions, but for embeddings in bfloat16
    and float16, whose rows autograd adds with more rounding, and for biases of inputs that are not contiguous. Further
    uses of a weight are added inside the matrix product, which rounds once where autograd rounds twice. A weight with a
    hook of its own is not fused; one that gets its hook after forward has no gradient to show to it.

    Raises VescaleError if there is no such layer.
    """
    layers = list(_layers(model))
    if not layers:
        raise VescaleError(
            f"{type(model).__name__}: no layer to fuse. Wrap the model with fully_shard first, and reduce gradients in "
            f"the dtype of computation over more than one rank (nn.Linear and nn.Embedding alone are fused)."
        )
    for _, module, forward in layers:
        vars(module)["forward"] = forward  # not by setattr, which a module may have replaced
    return FusedGradients({fqn: module for fqn, module, _ in layers})


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[..., Any]]]:
    places = {param: (group, i) for group in _groups(model) for i, param in enumerate(group.shards.params)}
    for name, module in model.named_modules():
        forward = type(module).forward
        if forward not in (nn.Linear.forward, nn.Embedding.forward) or "forward" in vars(module):
            continue
        place = places.get(cast(nn.Parameter, module._parameters.get("weight")))
        if place is None or not place[0].writes_gradients(place[1]):
            continue
        kind = _FusedLinear if forward is nn.Linear.forward else _FusedEmbedding
        if kind is _FusedEmbedding and (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
            continue
        yield f"{name}.weight" if name else "weight", module, kind(module, *place)


def _groups(model: nn.Module) -> Iterator[ParamGroup]:
    for state in dict.fromkeys(find_state(module) for module in model.modules()):
        if state is not None:
            yield from state.groups


class _Fused:
    """The forward of one layer."""

    def __init__(self, module: Any, group: ParamGroup, index: int) -> None:
        self._module = module
        self._group = group
        self._index = index
        self._own = type(module).forward

    def __call__(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self._applies(input):
            return cast(Tensor, self._own(self._module, input))
        return self._run(input)

    def _applies(self, input: Tensor) -> bool:
        weight = self._module.weight
        return (
            torch.is_grad_enabled()
            and weight.requires_grad
            and not _torch.has_hooks(weight)
            and self._group.lends(self._index, weight)
            and type(input) in (Tensor, nn.Parameter)
            and not torch.is_autocast_enabled(input.device.type)
            and not _torch.in_functorch()
            and self._takes(input, weight)
        )

    def _takes(self, input: Tensor, weight: Tensor) -> bool:
        raise NotImplementedError

    def _run(self, input: Tensor) -> Tensor:
        raise NotImplementedError

    def slot(self, weight: Tensor) -> tuple[Tensor, bool] | None:
        """Where this backward is to write the weight's gradient, and whether one to add to is there already.

        None where autograd was not asked for that gradient, or is to accumulate it itself.
        """
        if not _torch.will_accumulate(weight):
            return None
        return self._group.gradient_slot(self._index)


class _FusedLinear(_Fused):
    def _takes(self, input: Tensor, weight: Tensor) -> bool:
        return input.dtype == weight.dtype and input.dim() > 0 and not weight.is_complex()

    def _run(self, input: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, _Linear).apply(input, self._module.weight, self._module.bias, self))


class _FusedEmbedding(_Fused):
    def _takes(self, input: Tensor, weight: Tensor) -> bool:
        return True

    def _run(self, input: Tensor) -> Tensor:
        padding = self._module.padding_idx
        return cast(Tensor, cast(Any, _Embedding).apply(input, self._module.weight, padding, self))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: _Fused) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        grads, inputs = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        of_input = grads.mm(weight).view(input.shape) if ctx.needs_input_grad[0] else None
        of_bias = grads.sum(0) if ctx.needs_input_grad[2] else None
        found = ctx.layer.slot(weight)
        if found is None:
            return of_input, grads.t().mm(inputs), of_bias, None
        slot, is_filled = found
        if is_filled:
            slot.addmm_(grads.t(), inputs)
        else:
            torch.mm(grads.t(), inputs, out=slot)
        return of_input, None, of_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding: int | None, layer: _Fused) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.padding, ctx.layer = padding, layer
        return F.embedding(input, weight, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        rows, grads = input.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.padding is not None:
            used = rows != ctx.padding
            rows, grads = rows[used], grads[used]
        found = ctx.layer.slot(weight)
        slot, is_filled = found if found is not None else (torch.empty_like(weight), False)
        if not is_filled:
            slot.zero_()
        slot.index_add_(0, rows, grads)
        return None, None if found is not None else slot, None, None
