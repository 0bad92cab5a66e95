"""One group's shard buffer as an element-wise optimizer sees it: neighbours that are stepped as one flat tensor.

A rank's shard of a group holds a, b, c and d; b got no gradient, d has another learning rate:

    shard      |aaaa|bb|cccccc..|ddd|          two bytes of padding behind c
    segments   |aaaa|  |cccccc  |ddd|          three flat tensors instead of three DTensors; four if b had a gradient
    state      |aaaa|bb|cccccc..|ddd|          one buffer per state, cut like the shard; `state[p]` holds views of it

Where all four have a gradient in one buffer and one learning rate, there is one segment, padding included: with a
gradient and state of zero, padding keeps its zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_fsdp import _torch
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.group.shards import Shards

__all__ = ["STEP", "Member", "Segment", "Strip"]

State = dict[str, Any]
STEP = "step"
BRIDGE = 1024
"""Elements of padding that are stepped with their neighbours; the end of a lane may have more."""


@dataclass(eq=False)
class Member:
    """A parameter in the shard buffer: elements [begin, end). `follows`: nothing but padding parts it from the last."""

    fqn: str
    param: Tensor
    position: int
    group: int
    begin: int
    end: int
    follows: bool
    shown: tuple[Any, ...] = ()
    """What this strip put in the optimizer's state for the parameter; anything else there is from someone else."""

    @property
    def is_empty(self) -> bool:
        return self.begin == self.end


@dataclass(eq=False)
class Segment:
    """Members `first` to `last` of a strip as one flat tensor, `param`; `state` is what the optimizer finds for it.

    `lead` is the first member that has elements, if any.
    """

    first: int
    last: int
    lead: int
    group: int
    param: Tensor
    state: State = field(default_factory=dict)
    expected: tuple[Any, ...] = ()
    later_steps: Tensor | None = None
    """The `step` of the members behind the first, which follow its own."""

    @property
    def is_as_expected(self) -> bool:
        return len(self.state) == len(self.expected) and all(map(is_, self.state.values(), self.expected))


class Strip:
    """The parameters of one shard buffer that an optimizer steps, in buffer order, and their states.

    groups: index of the optimizer's group, for each parameter that it has.
    """

    def __init__(self, shards: Shards, fqns: Sequence[str], groups: Mapping[Tensor, int]) -> None:
        self.flat = shards.buffer.flat.detach()
        self.members = list(_members(shards, fqns, groups))
        self._first_local = _torch.local_of(self.members[0].param) if self.members else None
        self._begin, end = _bounds(self.members)
        self._numel = end - self._begin
        self._states: dict[str, Tensor] = {}
        self._steps: Tensor | None = None
        self._steps_version = -1
        self._pattern: tuple[object, ...] = ()
        self._neighbours = _Neighbours(self.members)
        self._joins: tuple[bool, ...] | None = None
        """Those of the last step, if all gradients lay in one buffer as their parameters do."""
        self.segments: list[Segment] = []
        self.version = 0
        """Counts the changes of `segments` and of which states they have."""

    @property
    def is_current(self) -> bool:
        """Whether the parameters still are views of the shard buffer; `to_fsdp2` gives them other memory."""
        return _torch.local_of(self.members[0].param) is self._first_local

    def prepare(
        self, states: Mapping[Tensor, State], joins: tuple[bool, ...], *, is_shown: bool = False
    ) -> list[Member]:
        """Bind this step's gradients to segments; returns the members that have to be stepped on their own.

        joins: for each of the optimizer's groups, whether neighbours are one tensor or pieces.
        is_shown: nobody has put other states there since the last step.
        """
        if is_shown and joins == self._joins and not self._steps_moved():
            known = self._neighbours.find()
            if known is not None:
                self._bind(known)
                return []
        pattern, locals, alone = self._scan(joins)
        taking_part = [member for member, kind in zip(self.members, pattern, strict=True) if kind is not None]
        changed = [member for member in taking_part if self._adopt(member, states)]
        if changed or pattern != self._pattern or self._steps_moved():
            self._pattern = pattern
            self.segments = list(self._cut(pattern, states))
            self.version += 1
        self._joins = joins if pattern == self._neighbours.pattern(joins) and self._neighbours.find() else None
        self._bind(locals)
        return alone

    def _bind(self, locals: Sequence[Tensor | None]) -> None:
        for segment, grad in zip(self.segments, self._gradients(locals), strict=True):
            segment.param.grad = grad

    def _scan(self, joins: tuple[bool, ...]) -> tuple[tuple[bool | None, ...], list[Tensor | None], list[Member]]:
        """For each member whether it continues a segment (None: not in one), each member's gradient, and the others."""
        pattern: list[bool | None] = []
        grads: list[Tensor | None] = []
        alone: list[Member] = []
        last: Member | None = None
        last_place: tuple[int, int] | None = None
        for member in self.members:
            grad = member.param.grad
            local = None if grad is None else _local_gradient(member.param, grad)
            grads.append(local)
            if local is None:
                pattern.append(None)
                last = last_place = None
                if grad is not None:
                    alone.append(member)
                continue
            place = last_place
            if not member.is_empty:
                place = (local.untyped_storage().data_ptr(), int(local.storage_offset()) - member.begin)
            together = last is not None and member.follows and last.group == member.group and joins[member.group]
            together = together and (last_place is None or place == last_place)
            pattern.append(together)
            last, last_place = member, place
        return tuple(pattern), grads, alone

    def _gradients(self, grads: Sequence[Tensor | None]) -> Iterator[Tensor]:
        """The gradient of each segment, over the memory that its members' gradients are in."""
        for segment in self.segments:
            grad = grads[segment.lead]
            assert grad is not None
            yield grad.as_strided((segment.param.numel(),), (1,), grad.storage_offset())

    def _steps_moved(self) -> bool:
        """Whether someone wrote into a parameter's `step`, as loading a checkpoint in place does."""
        return self._steps is not None and _torch.version_of(self._steps) != self._steps_version

    def _cut(self, pattern: Sequence[bool | None], states: Mapping[Tensor, State]) -> Iterator[Segment]:
        """Segments of members that go on from each other and have the same states at the same step."""
        steps = self._steps.tolist() if self._steps is not None else None
        first: int | None = None
        for position, goes_on in enumerate([*pattern, None]):
            if first is not None and not (goes_on and self._alike(first, position, states, steps)):
                yield self._segment(first, position - 1, states)
                first = None
            if first is None and goes_on is not None:
                first = position

    def _alike(self, one: int, two: int, states: Mapping[Tensor, State], steps: list[float] | None) -> bool:
        mine, theirs = states.get(self.members[one].param) or {}, states.get(self.members[two].param) or {}
        if list(mine) != list(theirs):
            return False
        return STEP not in mine or steps is None or steps[one] == steps[two]

    def _segment(self, first: int, last: int, states: Mapping[Tensor, State]) -> Segment:
        begin, end = _bounds(self.members[first : last + 1])
        lead = next((i for i in range(first, last + 1) if not self.members[i].is_empty), first)
        segment = Segment(first, last, lead, self.members[first].group, self.flat.narrow(0, begin, end - begin))
        for key, value in (states.get(self.members[first].param) or {}).items():
            segment.state[key] = value if key == STEP or value is None else self._part(key, begin, end)
        segment.expected = tuple(segment.state.values())
        return segment

    def _part(self, key: str, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of the shard in a state's buffer; an empty member may lie outside it."""
        return self._states[key].narrow(0, begin - self._begin if end > begin else 0, end - begin)

    def conclude(self, states: Mapping[Tensor, State]) -> None:
        """After the step: every member has its segment's step number, and state that is new."""
        for segment in self.segments:
            segment.param.grad = None
            if not segment.is_as_expected:
                self._show_new(segment, states)
            step = segment.state.get(STEP)
            if step is not None and segment.last > segment.first and self._steps is not None:
                if segment.later_steps is None:
                    segment.later_steps = self._steps[segment.first + 1 : segment.last + 1]
                segment.later_steps.fill_(step)
        if self._steps is not None:
            self._steps_version = _torch.version_of(self._steps)

    def _show_new(self, segment: Segment, states: Mapping[Tensor, State]) -> None:
        """Keep what the optimizer made for a segment, and let each member's state view it."""
        self.version += 1
        members = self.members[segment.first : segment.last + 1]
        begin, end = _bounds(members)
        for key, value in segment.state.items():
            if key == STEP:
                self._steps_like(value)[segment.first : segment.last + 1] = value.clone()
            elif value is not None:
                self._keep(key, value, begin, end)
        for member in members:
            state = states[member.param]
            for key, value in segment.state.items():
                state[key] = value if value is None else self._view(member, key)
            member.shown = tuple(state.values())
        for key in segment.state:
            if segment.state[key] is not None:
                shown = states[members[0].param][key]
                segment.state[key] = shown if key == STEP else self._part(key, begin, end)
        segment.expected = tuple(segment.state.values())

    def _keep(self, key: str, value: Tensor, begin: int, end: int) -> None:
        if key not in self._states and value.numel() == self._numel:
            self._states[key] = value.detach().view(-1)
            return
        self._make_state(key, value)
        part = self._part(key, begin, end)
        if part.data_ptr() != value.data_ptr():
            part.copy_(value.view(-1))

    def _adopt(self, member: Member, states: Mapping[Tensor, State]) -> bool:
        """Move state that someone else made, such as by loading, into the buffers; whether there was any."""
        state = states.get(member.param)
        if state is None:
            state = {}
        if len(state) == len(member.shown) and all(map(is_, state.values(), member.shown)):
            return False
        for key, value in state.items():
            if key == STEP:
                self._steps_like(torch.as_tensor(value))[member.position] = value
            elif value is not None:
                local = self._own_local(member, key, value)
                self._make_state(key, local)
                self._part(key, member.begin, member.end).copy_(local.reshape(-1))
            state[key] = value if value is None else self._view(member, key)
        member.shown = tuple(state.values())
        return True

    def _own_local(self, member: Member, key: str, value: Any) -> Tensor:
        if not isinstance(value, DTensor) or value.placements != member.param.placements:  # type: ignore[attr-defined]
            found = value.placements if isinstance(value, DTensor) else type(value).__name__
            raise VescaleError(
                f"{member.fqn}: expected state {key!r} placed as its parameter, got {found}. Load optimizer state "
                f"through torch.distributed.checkpoint.state_dict, which shards it."
            )
        return _torch.local_of(value)

    def _make_state(self, key: str, like: Tensor) -> None:
        if key not in self._states:
            self._states[key] = torch.zeros(self._numel, dtype=like.dtype, device=self.flat.device)
        if (made := self._states[key].dtype) != like.dtype:
            raise VescaleError(f"{self.members[0].fqn}: its group's state {key!r} is {made}, got {like.dtype}")

    def _steps_like(self, like: Tensor) -> Tensor:
        if self._steps is None or self._steps.device != like.device:
            old = self._steps
            self._steps = torch.zeros(len(self.members), dtype=like.dtype, device=like.device)
            if old is not None:
                self._steps.copy_(old)
            for segment in self.segments:
                segment.later_steps = None
        return self._steps

    def _view(self, member: Member, key: str) -> Tensor:
        """What the optimizer's state shows of a member: a scalar step, or a DTensor placed as the parameter."""
        if key == STEP:
            assert self._steps is not None
            return self._steps[member.position]
        flat = self._part(key, member.begin, member.end)
        local = flat.view(_torch.local_of(member.param).shape)
        spec = _torch.spec_of(member.param)
        if flat.dtype != member.param.dtype:
            spec = _torch.with_dtype(spec, flat.dtype)
        return _torch.dtensor(local, spec)


class _Neighbours:
    """Whether the gradients of all members lie in one buffer as the parameters do, as one reduction delivers them.

    Asked in every step, so it asks for all members at once, and only what torch answers without Python.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._params = [member.param for member in members]
        self._filled = [member.position for member in members if not member.is_empty]
        self._begins = [members[position].begin for position in self._filled]

    def pattern(self, joins: Sequence[bool]) -> tuple[bool, ...]:
        """Which members continue a segment if they do."""
        pairs = zip(self._members, self._members[1:], strict=False)
        return (False, *(two.follows and one.group == two.group and joins[two.group] for one, two in pairs))

    def find(self) -> list[Tensor] | None:
        """Their local gradients, or None."""
        grads = [param.grad for param in self._params]
        if not self._filled or not _torch.are_placed_as(grads, self._params):
            return None
        locals = _torch.locals_of(grads)
        filled = [locals[position] for position in self._filled]
        if _torch.common_base(filled) is None or not all(map(Tensor.is_contiguous, filled)):
            return None
        shift = int(filled[0].storage_offset()) - self._begins[0]
        offsets = [local.storage_offset() for local in filled]
        return locals if offsets == [begin + shift for begin in self._begins] else None


def _members(shards: Shards, fqns: Sequence[str], groups: Mapping[Tensor, int]) -> Iterator[Member]:
    """The optimizer's parameters in buffer order."""
    pieces = shards.buffer.pieces
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].begin, pieces[i].end))
    position, end, is_parted = 0, 0, True
    for i in order:
        group = groups.get(shards.params[i])
        if group is None:
            is_parted = is_parted or len(pieces[i]) > 0
            continue
        follows = not is_parted and (len(pieces[i]) == 0 or pieces[i].begin - end <= BRIDGE)
        yield Member(fqns[i], shards.params[i], position, group, pieces[i].begin, pieces[i].end, follows)
        position, is_parted = position + 1, False
        end = pieces[i].end if len(pieces[i]) else end


def _bounds(members: Sequence[Member]) -> tuple[int, int]:
    """The elements from the first to the last that the members have."""
    filled = [member for member in members if not member.is_empty]
    return (filled[0].begin, filled[-1].end) if filled else (0, 0)


def _local_gradient(param: Tensor, grad: Tensor) -> Tensor | None:
    """The local part of a gradient that is cut and typed as its parameter, contiguous; None for any other gradient."""
    if not isinstance(grad, DTensor) or grad.dtype != param.dtype:
        return None
    if _torch.spec_of(grad) is not _torch.spec_of(param) and grad.placements != param.placements:  # type: ignore[attr-defined]
        return None
    local = _torch.local_of(grad)
    return local if local.layout is torch.strided and local.is_contiguous() else None
