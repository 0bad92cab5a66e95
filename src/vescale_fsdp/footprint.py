"""How many bytes a step holds at once: a walk through forward and backward, by the sizes that the plans give.

Counted is what the runtime and autograd hold for parameters: shards, gathered parameters, gradients, buffers of
collectives. Not counted: activations, optimizer states, what a block format's encoding takes for a moment, and what a
collective's backend allocates inside. The step synchronises gradients and begins without any.

    one block of 100 bytes per rank, 2 ranks, float32, in backward, when the next block has been gathered:
      shards 200 | gathered 200 + 200 | gradients 200     = 800
      its parameters are freed and the input of the reduction is allocated: 800; the input is reduced: 700
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from .group.encoded_group import EncodedGroup
from .group.extension_group import ExtensionGroup
from .group.param_group import ParamGroup
from .group.streams import DeviceStreams
from .state import ModuleState

__all__ = ["GroupFootprint", "StepFootprint", "footprint_of_group", "footprint_of_step"]


@dataclass(frozen=True)
class GroupFootprint:
    """One group's bytes on a rank, by role; a role that the group does not need is 0."""

    shard: int
    whole: int
    """Gathered parameters."""
    wire: int
    """What else exists while it is gathered: a block format's planes, memory of a custom collective."""
    kept: int
    """Between forward and backward, where `reshard_after_forward` is a number."""
    grads: int
    """Autograd's gradients of the gathered parameters."""
    doubled_grads: int
    """Of parameters in several places, whose gradients exist twice for a moment."""
    reduction_input: int
    reduced: int
    """The result of the reduction in its dtype, where the stored gradient is another tensor."""
    stored_grads: int

    @property
    def peak(self) -> int:
        """The most that this group holds at once, in any schedule."""
        moments = (
            self.whole + max(self.wire, self.kept),
            self.whole + self.grads + self.doubled_grads,
            self.grads + self.reduction_input,
            self.reduction_input + self.reduced + self.stored_grads,
        )
        return self.shard + max(moments)


@dataclass(frozen=True)
class StepFootprint:
    """Bytes at the fullest moment of a step.

    `bound` holds wherever in forward a module uses its own parameters; `estimate` takes them to be used in the order in
    which they are defined. Both take modules to run in the order of the last forward, at first that of definition.
    """

    bound: int
    estimate: int


def footprint_of_group(group: ParamGroup) -> GroupFootprint | None:
    """None for tensor subclasses that gather themselves: only they know what they allocate."""
    if isinstance(group, ExtensionGroup):
        return None
    shards, num_ranks, views = group.shards, group.mesh.num_ranks, group.views_shard
    share = shards.buffer.flat.numel()
    reduce_dtype = group.mp_policy.reduce_dtype or group.compute_dtype
    alone = views and reduce_dtype == group.compute_dtype and group.mesh.num_replicas == 1
    numel, twice = _trainable_numels(group)
    on_device = not shards.is_offloaded or group.device.type == "cpu"
    whole = 0 if views else num_ranks * share * group.compute_dtype.itemsize
    reduction_input = num_ranks * share * reduce_dtype.itemsize if numel and not alone else 0
    stored = share * shards.dtype.itemsize if numel and not alone else 0
    is_cast = reduce_dtype != shards.dtype or not on_device
    staged = 2 if group.reduction.comm is not None else 1
    return GroupFootprint(
        shard=shards.nbytes if on_device else 0,
        whole=_handed_nbytes(group) or whole,
        wire=_wire_nbytes(group, whole),
        kept=_kept_numel(group, share) * group.compute_dtype.itemsize,
        grads=numel * group.compute_dtype.itemsize,
        doubled_grads=twice * group.compute_dtype.itemsize,
        reduction_input=staged * reduction_input,
        reduced=share * reduce_dtype.itemsize * staged if stored and (is_cast or staged > 1) else 0,
        stored_grads=stored if on_device else 0,
    )


def _trainable_numels(group: ParamGroup) -> tuple[int, int]:
    """Elements of all parameters that train, and of those in several places."""
    trained = [
        each for each in zip(group.shards.managed, group.shards.numels, strict=True) if each[0].param.requires_grad
    ]
    twice = [numel for each, numel in trained if len(each.owners) > 1]
    return sum(numel for _, numel in trained), sum(twice)


def _handed_nbytes(group: ParamGroup) -> int:
    """Of gathered codes and scales that modules compute with instead of decoded parameters."""
    if not isinstance(group, EncodedGroup) or not group.is_handed or group.quantized is None:
        return 0
    planes = group.quantized.planes
    blocks = sum(tiling.num_blocks for tiling in planes.tilings)
    return group.mesh.num_ranks * planes.wire_nbytes + blocks * planes.scale_nbytes


def _wire_nbytes(group: ParamGroup, whole: int) -> int:
    if group.quantized is not None:
        if _handed_nbytes(group) and group.all_gather_comm is None:
            return 0  # gathered where they stay
        return group.mesh.num_ranks * group.quantized.planes.wire_nbytes
    return whole if group.all_gather_comm is not None else 0


def _kept_numel(group: ParamGroup, share: int) -> int:
    if isinstance(group.reshard_after_forward, bool):
        return 0
    return group.mesh.num_ranks // group.reshard_after_forward * share


def footprint_of_step(root: nn.Module, states: Sequence[ModuleState]) -> StepFootprint | None:
    """Of forward and backward of `root`, whose wrapped modules have `states`, in module order."""
    sizes = {group: footprint_of_group(group) for state in states for group in state.groups}
    known = {group: size for group, size in sizes.items() if size is not None}
    if len(known) < len(sizes):
        return None
    tree = _Tree(root, states)
    bound, estimate = (_Walk(tree, known, early).peak() for early in (lambda group: known[group].grads, tree.early))
    return StepFootprint(bound, estimate)


class _Tree:
    """Which wrapped module lies in which, and in what order their forwards end."""

    def __init__(self, root: nn.Module, states: Sequence[ModuleState]) -> None:
        self.states = list(states)
        self._place = {module: i for i, module in enumerate(root.modules())}
        self._parent = {state: self._find_parent(state) for state in states}
        self.children = {state: [each for each in states if self._parent[each] is state] for state in states}
        recorded = states[0].schedule.last_order
        self.order = recorded if set(recorded) <= set(states) and recorded else self._defined_order()

    def _find_parent(self, state: ModuleState) -> ModuleState | None:
        """The innermost other state that has a module around this one's."""
        around = [
            (self._place[outer], other)
            for other in self.states
            if other is not state
            for outer in other.modules
            if any(inner is state.modules[0] for inner in outer.modules())
        ]
        return max(around, key=lambda found: found[0])[1] if around else None

    def _defined_order(self) -> list[ModuleState]:
        order: list[ModuleState] = []

        def visit(state: ModuleState) -> None:
            for child in self.children[state]:
                visit(child)
            order.append(state)

        for state in self.states:
            if self._parent[state] is None:
                visit(state)
        return order

    def path(self, state: ModuleState) -> list[ModuleState]:
        """From the outermost state around this one down to itself."""
        parent = self._parent[state]
        return [*(self.path(parent) if parent is not None else []), state]

    def early(self, group: ParamGroup) -> int:
        """Bytes of gradients that exist before the backward of wrapped modules inside: of what is defined behind."""
        (state,) = (each for each in self.states if group in each.groups)
        inside = [self._place[module] for child in self.children[state] for module in child.modules]
        first = min(inside, default=-1)
        return sum(
            numel * group.compute_dtype.itemsize
            for each, numel in zip(group.shards.managed, group.shards.numels, strict=True)
            if each.param.requires_grad and any(self._place[owner] > first for owner, _ in each.owners)
        )

    def keeps(self, state: ModuleState, group: ParamGroup) -> bool:
        """Whether the group stays gathered after forward; a root that has not run yet will."""
        will_be_root = state.is_root is None and self._parent[state] is None and state.reshard_is_automatic
        return will_be_root or group.reshard_after_forward is False


class _Walk:
    """One step: what is allocated and freed, in the order in which the runtime does it."""

    def __init__(
        self, tree: _Tree, sizes: dict[ParamGroup, GroupFootprint], early: Callable[[ParamGroup], int]
    ) -> None:
        self._tree = tree
        self._sizes = sizes
        self._early = early
        self._live = self._most = sum(size.shard for size in sizes.values())
        self._gathered: dict[ParamGroup, bool] = {}
        """Whether the gather has been waited for."""
        self._kept: set[ParamGroup] = set()
        self._grads: dict[ParamGroup, int] = {}
        streams = tree.states[0].schedule.streams
        self._max_held = streams.max_held if isinstance(streams, DeviceStreams) else 0
        self._held: deque[int] = deque()

    def peak(self) -> int:
        self._forward()
        self._backward()
        return self._most

    def _hold(self, nbytes: int) -> None:
        self._live += nbytes
        self._most = max(self._most, self._live)

    def _forward(self) -> None:
        begun: list[ModuleState] = []
        for state in self._tree.order:
            for each in self._tree.path(state):
                if each not in begun:
                    begun.append(each)
                    self._gather(each)
                    self._prefetch(self._forward_prefetch(each, len(begun)))
            for group in state.groups:
                self._end_forward(state, group)
            begun.remove(state)  # it may run again

    def _forward_prefetch(self, state: ModuleState, place: int) -> Sequence[ModuleState]:
        schedule = state.schedule
        if state.forward_prefetch or not schedule.num_forward_prefetch:
            return state.forward_prefetch
        return schedule.last_begun[place : place + schedule.num_forward_prefetch]

    def _end_forward(self, state: ModuleState, group: ParamGroup) -> None:
        if self._tree.keeps(state, group):
            return
        self._hold(self._sizes[group].kept)
        if self._sizes[group].kept:
            self._kept.add(group)
        self._free(group)

    def _backward(self) -> None:
        open_states: list[ModuleState] = []
        order = self._tree.order
        for index in reversed(range(len(order))):
            state = order[index]
            while open_states and open_states[-1] not in self._tree.path(state):
                self._end_backward(open_states.pop())
            self._begin_backward(state, order[index - 1 : index])
            open_states.append(state)
        while open_states:
            self._end_backward(open_states.pop())

    def _begin_backward(self, state: ModuleState, next_states: Sequence[ModuleState]) -> None:
        self._gather(state, backward=True)
        self._prefetch(state.backward_prefetch or next_states, backward=True)
        for group in state.groups:
            self._grads[group] = self._early(group)
            self._hold(self._grads[group])

    def _end_backward(self, state: ModuleState) -> None:
        for group in state.groups:
            size = self._sizes[group]
            self._hold(size.grads - self._grads[group])
            self._hold(size.doubled_grads)
            self._hold(-size.doubled_grads)
        for group in reversed(state.groups):
            if group.reshard_after_backward:
                self._free(group)
            if self._sizes[group].reduction_input:
                self._reduce(self._sizes[group])

    def _reduce(self, size: GroupFootprint) -> None:
        self._hold(size.reduction_input)
        self._hold(-size.grads)
        while self._held and len(self._held) >= self._max_held:
            self._hold(-self._held.popleft())
        self._hold(size.reduced)
        self._hold(size.stored_grads)
        self._hold(-size.reduced)
        if self._max_held:
            self._held.append(size.reduction_input)
        else:
            self._hold(-size.reduction_input)

    def _gather(self, state: ModuleState, *, backward: bool = False) -> None:
        self._prefetch([state], backward=backward)
        for group in state.groups:
            if self._gathered.get(group) is False:
                self._hold(-self._sizes[group].wire)
                self._gathered[group] = True
                if group in self._kept:
                    self._kept.remove(group)
                    self._hold(-self._sizes[group].kept)

    def _prefetch(self, states: Sequence[ModuleState], *, backward: bool = False) -> None:
        for state in states:
            for group in state.groups:
                if group not in self._gathered and (group.unshard_in_backward or not backward):
                    self._hold(self._sizes[group].whole + self._sizes[group].wire)
                    self._gathered[group] = False

    def _free(self, group: ParamGroup) -> None:
        if self._gathered.pop(group, None) is not None:
            self._hold(-self._sizes[group].whole)
