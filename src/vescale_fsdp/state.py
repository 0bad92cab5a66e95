"""What `fully_shard` attaches to modules: hooks that gather before use, free after it, and reduce after backward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import _torch
from .first_use import circles_of, log_plan, name_groups, settle_groups
from .group.param_group import ParamGroup, Phase
from .guards import Census
from .nested import cast_floats, map_tensors, with_grad
from .policy import MixedPrecisionPolicy
from .preflight import failing_together
from .schedule import Schedule

__all__ = ["ModuleState", "find_state"]


class ModuleState:
    """State of one `fully_shard` call: its modules, its groups, and where they are in the iteration."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: Sequence[ParamGroup],
        *,
        mp_policy: MixedPrecisionPolicy,
        reshard_is_automatic: bool,
        ignored: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        self.modules = modules
        self.groups = list(groups)
        self.mp_policy = mp_policy
        self.reshard_is_automatic = reshard_is_automatic
        self.ignored = ignored
        self.is_root: bool | None = None
        """None until the first forward of a model finds out."""
        self.phase = Phase.IDLE
        self.schedule: Schedule[ModuleState] = Schedule()
        self.schedule.states = [self]
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.max_reductions = 1
        """How many reductions may be under way; the model takes the most that any of its modules allows."""
        self._uses: list[int] = []
        """Positions in `schedule.order` of forwards whose backward has not come yet."""
        self._error_outside: BaseException | None = None
        """The exception that the caller was handling when forward began."""
        self._to_run: set[nn.Module] = set()
        """Modules of this call whose forward is still expected in this pass."""
        self._census: Census
        """Of the root alone."""
        self._hooks: list[RemovableHandle] = []
        for module in modules:
            _torch.attach_state(module, self)
            self._hooks += [
                module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.after_forward, always_call=True),
            ]

    def release(self) -> None:
        """Take everything off the modules but their sharded parameters."""
        for hook in self._hooks:
            hook.remove()
        for group in self.groups:
            group.release()
        for module in self.modules:
            _torch.forget_state(module)

    # What torch.distributed.pipelining uses

    @property
    def _state_ctx(self) -> Schedule[ModuleState]:
        return self.schedule

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return self.groups

    def _root_post_backward_final_callback(self) -> None:
        self.end_backward()

    # First use

    def ensure_ready(self) -> None:
        """Before the first use: the module that runs first is the root, and all wrapped modules below it join it."""
        if self.is_root is not None:
            return
        root = self.modules[0]
        with failing_together(circles_of(self.groups)):
            states = self._find_states(root)
        groups = [group for state in states for group in state.groups]
        circles = circles_of(groups)
        with failing_together(circles):
            name_groups(root, [(state.modules, state.groups) for state in states])
            self._census = _census_of(root, states)
        settle_groups(groups, circles)
        self._lead(states)
        log_plan(root, groups)

    def _find_states(self, root: nn.Module) -> list[ModuleState]:
        if len(self.modules) > 1:
            raise RuntimeError(f"fully_shard needs one root module, got {len(self.modules)}: wrap their parent too")
        states: list[ModuleState] = []
        for name, module in root.named_modules():
            state = find_state(module)
            if state is None or state in states:
                continue
            if state is not self and state.is_root is not None:
                raise RuntimeError(
                    f"{name}: ran forward before its root module {type(root).__name__}; run the root's forward first"
                )
            states.append(state)
        return states

    def _lead(self, states: list[ModuleState]) -> None:
        """Become the root of `states`."""
        self.schedule.states = states
        self.schedule.streams.max_held = max(state.max_reductions for state in states)
        for state in states:
            state.is_root = state is self
            state.schedule = self.schedule
            for group in state.groups:
                group.traffic = self.schedule.traffic
                group.streams = self.schedule.streams
        if self.reshard_is_automatic:
            for group in self.groups:
                group.reshard_after_forward = False

    # Forward

    @_torch.untraced
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.schedule.end_is_queued and not _torch.in_backward():
            self._drop_iteration()  # a backward raised, and autograd dropped the callback that ends it
        if self.phase is Phase.PRE_BACKWARD:  # activation checkpointing runs forward again
            self._gather()
            return self._cast_inputs(args, kwargs)
        first = self.phase is not Phase.FORWARD
        if first:
            self._error_outside = sys.exception()
            self.ensure_ready()
            if self.schedule.forward_root is None:
                self._start_iteration()
            self._to_run = set(self.modules)
        self.phase = Phase.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        for group in self.groups:
            group.phase = Phase.FORWARD
        self._gather()
        if first:
            args, kwargs = self._watch_inputs(args, kwargs)
            recorded = [] if _torch.in_backward() else self.schedule.begin(self)
            for state in self.forward_prefetch or recorded:
                state.prefetch(Phase.FORWARD)
        return args, kwargs

    def _start_iteration(self) -> None:
        schedule = self.schedule
        schedule.forward_root = self
        schedule.begun = []
        if self.is_root:
            self._look_around()
        schedule.streams.start_forward(schedule.post_optim_event)
        schedule.post_optim_event = None

    def _look_around(self) -> None:
        """What users assigned since the last iteration is taken over, or refused."""
        for state in self.schedule.states:
            for group in state.groups:
                group.adopt_assigned()
        if not self._census.holds:
            self._census = _census_of(self.modules[0], self.schedule.states)

    @_torch.untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.phase is Phase.PRE_BACKWARD:
            return self._cast_output(output)
        error = sys.exception()
        if error is not None and error is not self._error_outside:
            self.abandon_forward()
            return output
        self._to_run.discard(module)
        if self._to_run:
            return self._cast_output(output)
        return self._end_forward(output)

    def abandon_forward(self) -> None:
        """Forward raised: once that has reached the root, back to shards. Gradients that are held stay."""
        if self.schedule.forward_root is not self:
            return
        self.schedule.forward_root = None
        self.schedule.order.clear()
        for state in self.schedule.states:
            state._to_run.clear()
            state._uses.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.abandon_forward()

    def _end_forward(self, output: Any) -> Any:
        recomputing = _torch.in_backward()
        for group in self.groups:
            if not recomputing:
                group.reshard()
            group.phase = Phase.IDLE
        if not recomputing and torch.is_grad_enabled():  # no backward asks for the order of other forwards
            self._uses.append(len(self.schedule.order))
            self.schedule.order.append(self)
        self._watch_output(output)
        self.phase = Phase.IDLE
        if self.schedule.forward_root is self:
            output = self._end_unfinished(output)
            self._end_iteration_forward(recomputing)
        return self._cast_output(output)

    def _end_iteration_forward(self, recomputing: bool) -> None:
        schedule = self.schedule
        schedule.forward_root = None
        if recomputing:
            return
        schedule.last_begun = schedule.begun
        if torch.is_grad_enabled():
            schedule.last_order = list(schedule.order)
            return
        for state in schedule.states:  # no backward will end what was gathered ahead of a forward that did not come
            for group in state.groups:
                group.drop_gather()

    def _end_unfinished(self, output: Any) -> Any:
        """End the forward of states of which only some modules ran."""
        for state in reversed(self.schedule.states):
            if state is not self and state._to_run:
                state._to_run.clear()
                output = state._end_forward(output)
        return output

    def _gather(self) -> None:
        for group in self.groups:
            group.unshard(group.unshard_async_op)
        for group in self.groups:
            group.wait_for_unshard()

    def prefetch(self, phase: Phase) -> None:
        """Start gathering while other modules compute."""
        for group in self.groups if phase is Phase.FORWARD else reversed(self.groups):
            before, group.phase = group.phase, phase
            group.unshard(async_op=True)
            group.phase = before

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return cast_floats(dtype, args), cast_floats(dtype, kwargs)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floats(dtype, output)

    # Backward

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put a node on the inputs: when their gradients exist, the module's backward is over."""
        if not torch.is_grad_enabled() or not self.groups:
            return args, kwargs
        tensors = with_grad((args, kwargs))
        if not tensors:
            return args, kwargs
        watched = iter(cast(Any, _AfterBackward).apply(self, *tensors))
        if not kwargs and len(args) == 1 and args[0] is tensors[0]:
            return tuple(watched), kwargs
        return cast(
            tuple[tuple[Any, ...], dict[str, Any]],
            map_tensors(lambda tensor: next(watched) if tensor.requires_grad else tensor, (args, kwargs)),
        )

    def _watch_output(self, output: Any) -> None:
        """When the first gradient of an output arrives, the module's backward is about to begin."""
        if torch.is_grad_enabled():
            for tensor in with_grad(output):
                cast(Any, tensor).register_hook(self._before_backward)

    @_torch.untraced
    def _before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.schedule.end_is_queued:
            self.schedule.end_is_queued = True
            _torch.queue_after_backward(self.end_backward)
        self.phase = Phase.PRE_BACKWARD
        if any(group.phase is not Phase.PRE_BACKWARD for group in self.groups):
            for group in self.groups:
                group.phase = Phase.PRE_BACKWARD
            self._gather()
            self._prefetch_backward()
        return grad

    def _prefetch_backward(self) -> None:
        for state in self.backward_prefetch:
            state.prefetch(Phase.PRE_BACKWARD)
        if not self._uses:
            return
        use = self._uses.pop()
        if not self.backward_prefetch and use > 0:
            self.schedule.order[use - 1].prefetch(Phase.PRE_BACKWARD)

    @_torch.untraced
    def after_backward(self) -> None:
        """All gradients of the groups' parameters, for this use of the modules, exist."""
        for group in reversed(self.groups):
            group.post_backward()

    @_torch.untraced
    def end_backward(self) -> None:
        """The backward pass is over: reduce what is left and get ready for the next iteration."""
        schedule = self.schedule
        schedule.forward_root = None
        schedule.end_is_queued = False
        for state in schedule.states:
            state._to_run.clear()
            for group in reversed(state.groups):
                if group.phase is not Phase.POST_BACKWARD:
                    group.post_backward()
                group.phase = Phase.IDLE
            state.phase = Phase.IDLE
        if schedule.is_last_backward:
            schedule.streams.finish_backward()
            schedule.order.clear()
            for state in schedule.states:
                state._uses.clear()
                for group in state.groups:
                    group.finish_backward()

    def reset_iteration(self) -> None:
        """After an exception: drop the iteration and the gradients that it made."""
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self._drop_iteration()

    def _drop_iteration(self) -> None:
        schedule = self.schedule
        schedule.forward_root = None
        schedule.end_is_queued = False
        schedule.streams.finish_backward()
        schedule.order.clear()
        for state in schedule.states:
            state._to_run.clear()
            state._uses.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.reset_iteration()


class _AfterBackward(torch.autograd.Function):
    """Identity on a module's inputs whose backward says that the module's is over."""

    @staticmethod
    def forward(ctx: Any, state: ModuleState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.state.after_backward()
        return (None, *grads)


def find_state(module: nn.Module) -> ModuleState | None:
    state = _torch.state_of(module)
    return state if isinstance(state, ModuleState) else None


def _census_of(root: nn.Module, states: list[ModuleState]) -> Census:
    ignored: set[nn.Parameter] = set().union(*(state.ignored for state in states))
    managed = {param for state in states for group in state.groups for param in group.registered}
    return Census(root, managed, ignored)
