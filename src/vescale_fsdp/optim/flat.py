"""Element-wise torch optimizers that step each group's flat shard instead of every parameter.

    optimizer = flat(torch.optim.AdamW(model.parameters(), lr=1e-3), model)

A step over DTensors costs tens of microseconds of Python for each of them; over a group's flat shard it is one tensor.
What everyone else sees stays as it was: parameter groups, `optimizer.state[param]` and state dicts hold a DTensor per
parameter, and each element gets the same bits as from the optimizer's own step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from vescale_fsdp.errors import VescaleError
from vescale_fsdp.group.shards import Shards
from vescale_fsdp.state import ModuleState, find_state

from .strip import Strip
from .tiles import Batch, Tile, batches, joins

__all__ = ["flat"]

Group = dict[str, Any]


def flat(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Let `optimizer` step the flat shards of `model`, which `fully_shard` wrapped; returns the same object.

    optimizer: SGD, Adam, AdamW, Adagrad or RMSprop of torch.optim over parameters of the model; others may be among
        them and are stepped as before. Make learning-rate schedulers after this call.

    Neighbours in a shard are one tensor while they have a gradient, one parameter group, and the same `step`; what
    changes any of that costs one slower step. Parameters in bfloat16 and float16 on the CPU, and CPU optimizers with
    `fused=True`, are stepped parameter by parameter, without DTensors: those kernels round the last elements of a
    tensor unlike the others. On one rank gradients are autograd's own tensors, so each parameter is one there, too.

    Raises ValueError for optimizers that this does not know, `differentiable=True`, and a replaced `optimizer.step`.
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        known = ", ".join(each.__name__ for each in _KINDS)
        raise ValueError(f"flat: expected one of torch.optim's {known}, got {type(optimizer).__name__}")
    if "step" in vars(optimizer):
        raise ValueError("flat: optimizer.step was replaced, by a scheduler perhaps. Call flat() before you make that.")
    for group in optimizer.param_groups:
        _check(group)
    if not _states(model):
        raise ValueError(f"flat: {type(model).__name__} holds no module that vescale_fsdp.fully_shard wrapped")
    make: Callable[..., Optimizer] = type(optimizer)
    shadow = make([torch.zeros(0)])
    shadow.defaults = optimizer.defaults  # Adagrad makes states from them
    optimizer.__class__ = kind
    assert isinstance(optimizer, _Flat)
    optimizer._flattened = Flattened(optimizer, shadow, model)
    return optimizer


def _check(group: Group) -> None:
    if group.get("differentiable"):
        raise ValueError("flat: differentiable=True needs the optimizer's own step")


class Flattened:
    """The strips of an optimizer's parameters, and the `shadow` that steps their segments with the optimizer's code."""

    def __init__(self, optimizer: Optimizer, shadow: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._shadow = shadow
        self._model = model
        self._update = getattr(type(shadow).step, "__wrapped__", type(shadow).step)  # hooks are the optimizer's
        self._shown = _Shown({})
        self.regroup()

    def regroup(self) -> None:
        """Find the strips anew: the optimizer has other groups, or the model other buffers."""
        group_of = {param: i for i, group in enumerate(self._optimizer.param_groups) for param in group["params"]}
        found = list(_shards(self._model))
        self._buffers = [(shards, shards.buffer.flat) for shards, _ in found]
        strips = [Strip(shards, fqns, group_of) for shards, fqns in found if _is_plain(shards)]
        self._strips = [strip for strip in strips if strip.members]
        held = {member.param for strip in self._strips for member in strip.members}
        self._others = [param for param in group_of if param not in held]
        self._group_of = group_of
        self._listed = [list(group["params"]) for group in self._optimizer.param_groups]
        self._cut_version = -1
        self._parts: list[Tile] = []
        self._batches: list[Batch] = []
        self._tile_states: dict[Tensor, dict[str, Any]] = {}

    @property
    def _is_current(self) -> bool:
        """Whether buffers, parameters and groups are those of the strips; anyone may replace them between steps."""
        if any(shards.buffer.flat is not flat for shards, flat in self._buffers):
            return False
        lists = [group["params"] for group in self._optimizer.param_groups]
        if [len(each) for each in lists] != [len(each) for each in self._listed]:
            return False
        return all(strip.is_current for strip in self._strips) and all(
            all(map(is_, params, listed)) for params, listed in zip(lists, self._listed, strict=True)
        )

    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        if not self._is_current:
            self.regroup()
        states, groups = self._optimizer.state, self._optimizer.param_groups
        known, alone = len(states), list(self._others)
        is_shown = self._shown.is_all_of(states)
        for strip in self._strips:
            alone += strip.prepare(states, tuple([joins(strip.flat, group) for group in groups]), is_shown=is_shown)
        self._cut()
        for tile in self._parts:
            tile.bind()
        settings = [_settings(group) for group in groups]
        shadow = self._shadow
        shadow.param_groups = [
            *({**settings[batch.group], "params": batch.params} for batch in self._batches),
            *({**groups[group], "params": params} for group, params in self._by_group(alone)),
        ]
        shadow.state = defaultdict(dict, self._tile_states)
        shadow.state.update({param: states[param] for param in alone if param in states})
        for name in ("grad_scale", "found_inf"):  # torch.amp.GradScaler puts them on the optimizer
            setattr(shadow, name, getattr(self._optimizer, name, None))
        self._update(shadow)
        states.update({param: shadow.state[param] for param in alone if shadow.state.get(param)})
        for tile in self._parts:
            tile.release()
        for strip in self._strips:
            strip.conclude(states)
        if len(states) != known:
            _put_in_order(states, groups)
            is_shown = False
        if not is_shown or self._cut_version != self._num_changes:
            self._shown = _Shown(states)

    def _cut(self) -> None:
        """Tiles and batches of the strips' segments, made anew when those changed."""
        if self._cut_version == self._num_changes:
            return
        self._cut_version = self._num_changes
        segments = [segment for strip in self._strips for segment in strip.segments]
        tiles, self._batches = batches(segments, self._optimizer.param_groups)
        self._parts = [tile for tile in tiles if not tile.is_whole]
        self._tile_states = {tile.param: tile.state for tile in tiles}

    @property
    def _num_changes(self) -> int:
        """Counts the changes of segments and their states."""
        return sum(strip.version for strip in self._strips)

    def _by_group(self, params: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        by_group: dict[int, list[Tensor]] = defaultdict(list)
        for param in params:
            by_group[self._group_of[param]].append(param)
        yield from by_group.items()


def _put_in_order(states: dict[Tensor, Any], groups: Sequence[Group]) -> None:
    """Each rank made them in the order of its own pieces, but collectives over states go by one order on all ranks."""
    for param in chain.from_iterable(group["params"] for group in groups):
        if param in states:
            states[param] = states.pop(param)


class _Shown:
    """The optimizer's states as the last step left them."""

    def __init__(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        self._states = states
        self._dicts = list(states.values())
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def is_all_of(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether nobody has put other states there since; what they hold may differ."""
        if states is not self._states or len(states) != len(self._dicts):
            return False
        if not all(map(is_, states.values(), self._dicts)) or sum(map(len, self._dicts)) != len(self._values):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values))


class _Flat(Optimizer):
    """Replaces the step of the optimizer class that follows in a subclass."""

    _flattened: Flattened | None = None

    # The decoration is what torch does to each class when it is first used: the optimizer's hooks run around its step.
    @Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the flat shards."""
        if self._flattened is None:
            raise VescaleError(f"{type(self).__name__} was copied or unpickled: make a new optimizer and call flat().")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._flattened.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: Group) -> None:
        _check(param_group)
        super().add_param_group(param_group)
        if self._flattened is not None:
            self._flattened.regroup()


class FlatSGD(_Flat, SGD):
    """torch.optim.SGD on flat shards."""


class FlatAdam(_Flat, Adam):
    """torch.optim.Adam on flat shards."""


class FlatAdamW(_Flat, AdamW):
    """torch.optim.AdamW on flat shards."""


class FlatAdagrad(_Flat, Adagrad):
    """torch.optim.Adagrad on flat shards."""


class FlatRMSprop(_Flat, RMSprop):
    """torch.optim.RMSprop on flat shards."""


_KINDS: dict[type[Optimizer], type[_Flat]] = {
    SGD: FlatSGD,
    Adam: FlatAdam,
    AdamW: FlatAdamW,
    Adagrad: FlatAdagrad,
    RMSprop: FlatRMSprop,
}


def _states(model: nn.Module) -> list[ModuleState]:
    return list(dict.fromkeys(state for module in model.modules() if (state := find_state(module)) is not None))


def _shards(model: nn.Module) -> Iterator[tuple[Shards, Sequence[str]]]:
    for state in _states(model):
        for group in state.groups:
            yield group.shards, group.fqns


def _is_plain(shards: Shards) -> bool:
    """Whether the parameters are views of the shard buffer; subclasses that gather themselves have their own memory."""
    storage = shards.buffer.flat.untyped_storage()
    return not shards.buffer.flat.is_meta and all(
        type(local) is Tensor and local.untyped_storage().data_ptr() == storage.data_ptr() for local in shards.locals
    )


def _settings(group: Group) -> Group:
    """The group's settings for plain tensors; where torch would choose, it is to choose as it does for DTensors."""
    if group.get("foreach") is None and not group.get("fused"):
        return {**group, "foreach": False}
    return group
