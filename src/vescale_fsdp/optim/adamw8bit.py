"""AdamW with 8-bit state: both moments in a block format, two bytes per element, on sharded parameters.

After 8-bit Adam (arXiv 2110.02861), with one difference: what is kept of the second moment is its root. Both states
then span the same range of magnitudes, so that no element keeps a first moment while its second one is rounded to zero,
which would divide by `eps`.

Which parameters: those of at least two dims and `min_numel` elements, counted globally. The others keep float32 moments
under torch.optim.AdamW's names. Blocks lie whole on one rank, so that a step needs no communication, and the state of
an element is the same at every world size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp._torch import foreach_copy_
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.formats.block_format import BlockFormat, decode_blocks, encode_blocks
from vescale_fsdp.plugins import registry
from vescale_fsdp.policy import ParamPolicy

from .blocks import BlockedParam, Tiles
from .lend import flat_local

__all__ = ["AdamW8bit", "adamw_update"]

STATE_FORMAT, ROOT_FORMAT = "dynamic8_block", "dynamic8_block_unsigned"
MIN_NUMEL = 4096

State = dict[str, Any]
BLOCKED = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_root_codes", "exp_avg_sq_root_scales")
"""State of a parameter in blocks, besides `step`."""


def adamw_update(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: Mapping[str, Any]
) -> Tensor:
    """One AdamW step of float32 tensors, in place; returns the root of the second moment.

    Each op rounds once and none is fused, so that an element's result does not depend on whether vector instructions or
    the remaining loop computed it, and therefore not on where a rank's piece begins and ends.
    """
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    exp_avg.mul_(beta1).add_(grad * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_((grad * grad).mul_(1 - beta2))
    root = exp_avg_sq.sqrt()
    denominator = root.div(math.sqrt(1 - beta2**step)).add_(group["eps"])
    update = torch.div(exp_avg, denominator, out=denominator).mul_(lr / (1 - beta1**step))
    param.mul_(1 - lr * group["weight_decay"]).sub_(update)
    return root


class AdamW8bit(Optimizer):
    """Decoupled-weight-decay Adam whose moments take one byte and a share of a scale each.

    params: parameters, or (fqn, parameter) pairs, so that errors name them.
    state_format, root_format: block formats of the first moment and of the second one's root, both with the same blocks
        and 8-bit codes: names that plugins registered, or formats.
    min_numel: smaller parameters keep float32 moments, and so do those of fewer than two dims.

    Raises VescaleError if a parameter is cut inside a block; `AdamW8bit.policy` is the `param_policy` that prevents it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_format: str | BlockFormat | None = STATE_FORMAT,
        root_format: str | BlockFormat | None = ROOT_FORMAT,
        min_numel: int = MIN_NUMEL,
    ) -> None:
        _check_numbers(lr, betas, eps, weight_decay)
        self._formats: dict[str, BlockFormat] = {}
        self._blocked: dict[Tensor, BlockedParam] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_format": state_format,
            "root_format": root_format,
            "min_numel": min_numel,
        }
        super().__init__(params, defaults)

    @staticmethod
    def policy(fqn: str, param: Tensor) -> ParamPolicy | None:
        """The `param_policy` of `fully_shard` for this optimizer's defaults: no rank boundary inside a 32x32 block."""
        return ParamPolicy(state_format=STATE_FORMAT) if is_in_blocks(param, MIN_NUMEL) else None

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        formats = self._formats_of(group)
        for name, param in zip(_names(self.param_groups, group), group["params"], strict=True):
            if formats is not None and is_in_blocks(param, group["min_numel"]):
                self._blocked[param] = BlockedParam(name, param, formats[0].block_shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; no communication."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            whole: dict[int, list[Tensor]] = defaultdict(list)
            blocked: dict[int, list[BlockedParam]] = defaultdict(list)
            formats = self._formats_of(group)
            for name, param in zip(_names(self.param_groups, group), group["params"], strict=True):
                if param.grad is None:
                    continue
                step = self._begin_step(name, param, formats)
                if param in self._blocked:
                    blocked[step].append(self._blocked[param])
                else:
                    whole[step].append(param)
            for step, params in whole.items():
                self._step_whole(params, step, group)
            for step, each in blocked.items():
                assert formats is not None
                self._step_blocked(each, step, group, formats)
        return loss

    def load_state_dict(self, state_dict: State) -> None:
        """Load what `state_dict` returned, at any world size (through torch.distributed.checkpoint)."""
        super().load_state_dict(state_dict)
        # torch casts state to a floating-point parameter's dtype, codes and float32 moments too: take them as they are.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    device = value.device if name == "step" else param.device
                    self.state[param][name] = value.detach().to(device, copy=True)
            self._check_loaded(param)

    def _formats_of(self, group: State) -> tuple[BlockFormat, BlockFormat] | None:
        """Formats of both states; the group keeps their names, which can be saved."""
        found = []
        for key in ("state_format", "root_format"):
            given = group[key]
            if given is None:
                return None
            if not isinstance(given, str):
                self._formats[given.name] = given
                group[key] = given = given.name
            found.append(self._formats.get(given) or registry().format(given))
        one, two = found
        if one.block_shape != two.block_shape or {one.bits, two.bits} != {8}:
            raise VescaleError(
                f"expected two formats with the same blocks and 8-bit codes, got {one.name} ({one.block_shape}, "
                f"{one.bits} bits) and {two.name} ({two.block_shape}, {two.bits} bits)"
            )
        return one, two

    def _begin_step(self, name: str, param: Tensor, formats: tuple[BlockFormat, BlockFormat] | None) -> int:
        """Make the state if there is none, count the step, and return its number."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise VescaleError(f"{name}: AdamW8bit does not support sparse gradients.")
        if isinstance(param, DTensor) and (not isinstance(grad, DTensor) or grad.placements != param.placements):
            found = grad.placements if isinstance(grad, DTensor) else "a plain tensor"
            raise VescaleError(f"{name}: expected a gradient placed as its parameter, {param.placements}, got {found}.")
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            if param in self._blocked:
                assert formats is not None
                for prefix, format in zip(("exp_avg", "exp_avg_sq_root"), formats, strict=True):
                    codes, scales = self._blocked[param].new_state(format)
                    state[f"{prefix}_codes"], state[f"{prefix}_scales"] = codes, scales
            else:
                state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        state["step"] += 1
        return int(state["step"].item())

    def _step_blocked(
        self, params: list[BlockedParam], step: int, group: State, formats: tuple[BlockFormat, BlockFormat]
    ) -> None:
        """Decode, update and encode again: blocks of all parameters together, as many at a time as stay in cache."""
        local = {each: self._local(each) for each in params}
        for tiles in Tiles.batches([each for each in params if each.numel]):
            values, grads, codes, scales, root_codes, root_scales = zip(
                *(local[chunk.param] for chunk in tiles.chunks), strict=True
            )
            exp_avg = decode_blocks(formats[0], tiles.load(codes, torch.uint8), tiles.load_scales(scales))
            root = decode_blocks(formats[1], tiles.load(root_codes, torch.uint8), tiles.load_scales(root_scales))
            for state in (exp_avg, root):
                tiles.clear_padding(state)
            wide = tiles.load(values, torch.float32)
            root = adamw_update(wide, tiles.load(grads, torch.float32), exp_avg, root.mul_(root), step, group)
            tiles.store(wide, values)
            for format, state, to_codes, to_scales in (
                (formats[0], exp_avg, codes, scales),
                (formats[1], root, root_codes, root_scales),
            ):
                new_codes, new_scales = encode_blocks(format, state)
                tiles.store(new_codes, to_codes)
                tiles.store_scales(new_scales, to_scales)

    def _local(self, blocked: BlockedParam) -> tuple[Tensor, ...]:
        """Flat local values and gradient, then the state in the order of BLOCKED: views to write into."""
        param, grad, name = blocked.param, blocked.param.grad, blocked.name
        assert grad is not None
        state = (_local(self.state[param][key]).view(-1) for key in BLOCKED)
        return flat_local(param, name), flat_local(grad, name), *state

    def _step_whole(self, params: list[Tensor], step: int, group: State) -> None:
        """All parameters with float32 moments at once, as one flat tensor: they are small."""
        states = [self.state[param] for param in params]
        targets = [
            [_local(each).detach().view(-1) for each in tensors]
            for tensors in (params, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states])
        ]
        grads = [_local(param.grad).reshape(-1).float() for param in params if param.grad is not None]
        flat = [torch.cat([each.float() for each in tensors]) for tensors in targets]
        adamw_update(flat[0], torch.cat(grads), flat[1], flat[2], step, group)
        sizes = [each.numel() for each in targets[0]]
        for result, tensors in zip(flat, targets, strict=True):
            foreach_copy_(tensors, torch.split(result, sizes))

    def _check_loaded(self, param: Tensor) -> None:
        state = self.state.get(param)
        if not state:
            return
        wanted = BLOCKED if param in self._blocked else ("exp_avg", "exp_avg_sq")
        if missing := [key for key in wanted if key not in state]:
            name = self._blocked[param].name if param in self._blocked else f"a parameter of {tuple(param.shape)}"
            raise VescaleError(
                f"{name}: the loaded state has {sorted(state)}, but not {missing}. "
                f"It was saved by another optimizer, or with another min_numel or state_format."
            )


def is_in_blocks(param: Tensor, min_numel: int) -> bool:
    """Whether the parameter's state is kept in blocks: decided from its global shape."""
    return param.ndim >= 2 and param.numel() >= max(min_numel, 1) and param.is_floating_point()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _names(groups: list[State], group: State) -> list[str]:
    if "param_names" in group:
        return list(group["param_names"])
    before = sum(len(each["params"]) for each in groups[: next(i for i, each in enumerate(groups) if each is group)])
    return [f"parameter {before + i}" for i in range(len(group["params"]))]


def _check_numbers(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise VescaleError(f"{name}: expected >= 0, got {value}")
    if not all(0 <= beta < 1 for beta in betas):
        raise VescaleError(f"betas: expected two numbers in [0, 1), got {betas}")
