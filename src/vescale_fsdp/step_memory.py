"""What a rank holds during a step: a walk through forward and backward, by the sizes that footprint.py gives.

The step synchronises gradients and begins without any.

    one block of 100 bytes per rank, 2 ranks, float32, in backward, when the next block has been gathered:
      shards 200 | gathered 200 + 200 | gradients 200     = 800
      its parameters are freed and the input of the reduction is allocated: 800; the input is reduced: 700
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count

from torch import nn

from .caching_allocator import Allocation, reserved_nbytes
from .footprint import GroupFootprint, footprint_of_group
from .group.param_group import ParamGroup
from .group.streams import NUM_LANES, DeviceStreams
from .state import ModuleState

__all__ = ["StepFootprint", "footprint_of_step"]


@dataclass(frozen=True)
class StepFootprint:
    """Bytes at the fullest moment of a step.

    `bound` holds wherever in forward a module uses its own parameters; `estimate` takes them to be used in the order in
    which they are defined. Both take modules to run in the order of the last forward, at first that of definition.
    `reserved` is what a caching allocator keeps for the larger of the two, as caching_allocator.py replays it.
    """

    bound: int
    estimate: int
    reserved: int


def footprint_of_step(root: nn.Module, states: Sequence[ModuleState]) -> StepFootprint | None:
    """Of forward and backward of `root`, whose wrapped modules have `states`, in module order."""
    sizes = {group: footprint_of_group(group) for state in states for group in state.groups}
    known = {group: size for group, size in sizes.items() if size is not None}
    if len(known) < len(sizes):
        return None
    tree = _Tree(root, states)
    walks = [_Walk(tree, known, early) for early in (lambda group: range(len(known[group].grads)), tree.early)]
    bound, estimate = (walk.ledger.most for walk in walks)
    return StepFootprint(bound, estimate, max(reserved_nbytes(walk.ledger.allocations) for walk in walks))


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

    def early(self, group: ParamGroup) -> list[int]:
        """Parameters whose gradients exist before the backward of wrapped modules inside: those defined behind them."""
        (state,) = (each for each in self.states if group in each.groups)
        inside = [self._place[module] for child in self.children[state] for module in child.modules]
        first = min(inside, default=-1)
        managed = group.shards.managed
        return [i for i, each in enumerate(managed) if any(self._place[owner] > first for owner, _ in each.owners)]

    def keeps(self, state: ModuleState, group: ParamGroup) -> bool:
        """Whether the group stays gathered after forward; a root that has not run yet will."""
        will_be_root = state.is_root is None and self._parent[state] is None and state.reshard_is_automatic
        return will_be_root or group.reshard_after_forward is False


class _Ledger:
    """What is allocated and freed, in order."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.live: dict[Hashable, int] = {}
        self.most = 0
        self._total = 0

    def take(self, name: Hashable, nbytes: int, stream: Hashable = None) -> None:
        if nbytes and name not in self.live:
            self.allocations.append(Allocation(name, nbytes, stream))
            self.live[name] = nbytes
            self._total += nbytes
            self.most = max(self.most, self._total)

    def drop(self, name: Hashable) -> None:
        if name in self.live:
            self.allocations.append(Allocation(name, 0))
            self._total -= self.live.pop(name)


class _Walk:
    """One step: what is allocated and freed, in the order in which the runtime does it."""

    def __init__(
        self, tree: _Tree, sizes: dict[ParamGroup, GroupFootprint], early: Callable[[ParamGroup], Sequence[int]]
    ) -> None:
        self.ledger = _Ledger()
        self._tree = tree
        self._sizes = sizes
        self._early = early
        self._gathered: dict[ParamGroup, bool] = {}
        """Whether the gather has been waited for."""
        streams = tree.states[0].schedule.streams
        self._max_held = streams.max_held if isinstance(streams, DeviceStreams) else 0
        self._held: deque[list[Hashable]] = deque()
        self._names = count()
        self._lane = 0
        for group, size in sizes.items():
            self.ledger.take((group, "shard"), size.shard)
        self._forward()
        self._backward()

    def _forward(self) -> None:
        begun: list[ModuleState] = []
        for state in self._tree.order:
            for each in self._tree.path(state):
                if each not in begun:
                    begun.append(each)
                    self._gather(each)
                    self._prefetch(self._forward_prefetch(each, len(begun)))
            for group in state.groups:
                if not self._tree.keeps(state, group):
                    self.ledger.take((group, "kept"), self._sizes[group].kept)
                    self._free(group)
            begun.remove(state)  # it may run again

    def _forward_prefetch(self, state: ModuleState, place: int) -> Sequence[ModuleState]:
        schedule = state.schedule
        if state.forward_prefetch or not schedule.num_forward_prefetch:
            return state.forward_prefetch
        return schedule.last_begun[place : place + schedule.num_forward_prefetch]

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
            self._take_grads(group, self._early(group))

    def _take_grads(self, group: ParamGroup, params: Sequence[int]) -> None:
        for i in params:
            self.ledger.take((group, "grad", i), self._sizes[group].grads[i])

    def _end_backward(self, state: ModuleState) -> None:
        for group in state.groups:
            self._take_grads(group, range(len(self._sizes[group].grads)))
            self.ledger.take((group, "doubled"), self._sizes[group].doubled_grads)
            self.ledger.drop((group, "doubled"))
        for group in reversed(state.groups):
            if group.reshard_after_backward:
                self._free(group)
            if self._sizes[group].portion:
                self._reduce(group, self._sizes[group])

    def _reduce(self, group: ParamGroup, size: GroupFootprint) -> None:
        ledger, stream = self.ledger, "reduce" if self._max_held else None
        while self._held and len(self._held) >= self._max_held:
            for name in self._held.popleft():
                ledger.drop(name)
        portions: list[Hashable] = [("portion", next(self._names)) for _ in range(size.num_portions)]
        # Of a group that is reduced again, the result is added to the stored gradients.
        stored: Hashable = (group, "stored")
        is_result = not size.reduced and stored not in ledger.live
        result: Hashable = stored if is_result else ("reduced", next(self._names))
        for name in portions:
            ledger.take(name, size.portion)
            if name == portions[-1]:
                for i in range(len(size.grads)):
                    ledger.drop((group, "grad", i))
            ledger.take(result, size.reduced or size.stored_grads, stream)
            if not self._max_held:
                ledger.drop(name)
        if self._max_held:
            self._held.append(portions)
        if not is_result:
            ledger.take(stored, size.stored_grads, stream)
            ledger.drop(result)

    def _gather(self, state: ModuleState, *, backward: bool = False) -> None:
        self._prefetch([state], backward=backward)
        for group in state.groups:
            if self._gathered.get(group) is False:
                self._gathered[group] = True
                self.ledger.drop((group, "wire"))
                self.ledger.drop((group, "kept"))

    def _prefetch(self, states: Sequence[ModuleState], *, backward: bool = False) -> None:
        for state in states:
            for group in state.groups:
                if group not in self._gathered and (group.unshard_in_backward or not backward):
                    lane = f"lane {self._lane}" if self._max_held else None
                    self.ledger.take((group, "whole"), self._sizes[group].whole, lane)
                    self.ledger.take((group, "wire"), self._sizes[group].wire, lane)
                    self._gathered[group] = False
                    self._lane = (self._lane + 1) % NUM_LANES

    def _free(self, group: ParamGroup) -> None:
        if self._gathered.pop(group, None) is not None:
            self.ledger.drop((group, "whole"))
