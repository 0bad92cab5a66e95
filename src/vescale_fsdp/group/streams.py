"""In which order a device does a model's work: streams and events, or their twin that does nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["DeviceStreams", "Streams", "streams_of"]

NUM_LANES = 2
"""Gathered buffers take turns in two pools of memory: a gather into one may start while the other is in use."""


class Streams:
    """For devices whose work is done when a call returns: every wait is over before it begins."""

    max_held = 1
    """How many reductions may be under way before backward waits for the oldest."""

    def start_forward(self, after: Any = None) -> None:
        """The next gathers wait for the optimizer: for event `after`, or for all work issued so far."""

    def take_lane(self) -> int:
        """The pool of memory for the next gathered buffer."""
        return 0

    def gathering(self, lane: int) -> AbstractContextManager[Any]:
        """Issue allocation, cast and gather of one buffer in here."""
        return nullcontext()

    def gathered(self, lane: int) -> Any:
        """The event to wait for before the buffer that was just gathered is used."""
        return None

    def use(self, event: Any) -> None:
        """Computation waits for `event`."""

    def done_with(self, lane: int) -> None:
        """Computation that was issued so far is the last to use the lane's buffer; call before freeing it."""

    def start_reduction(self) -> None:
        """A group's reduction begins: computation waits for the oldest if too many are under way."""

    def reducing(self) -> AbstractContextManager[Any]:
        """Issue the reduction of a portion in here; it waits for computation."""
        return nullcontext()

    def reduced(self, free_input: Callable[[], None]) -> None:
        """A portion's reduction was issued; `free_input` is called once its input is not needed any more."""
        free_input()

    def after_reduction(self) -> AbstractContextManager[Any]:
        """Issue what works on the result in here."""
        return nullcontext()

    def settle(self) -> None:
        """Computation waits for all reductions, and their inputs are freed."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue a user's hook in their own stream, after the reduction."""
        return nullcontext()

    def finish_backward(self) -> None:
        """Computation waits for all reductions."""


class DeviceStreams(Streams):
    """Gathers, reductions and computation each in a stream of their own, ordered by events.

    Memory is only reused in the order of a single stream: gathered buffers are allocated in the stream of their lane,
    whose next gather waits until computation is done with the lane's previous buffer; inputs of reductions are
    allocated in the computing stream and kept until it has waited for the reduction. So nothing needs `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = [torch.Stream(device, priority=-1) for _ in range(NUM_LANES)]
        self._reduce = torch.Stream(device, priority=-1)
        self._last_use: list[torch.Event | None] = [None] * NUM_LANES
        self._next_lane = 0
        self._held: deque[list[tuple[torch.Event, Callable[[], None]]]] = deque()
        """Of each reduction under way, its portions."""

    @property
    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def start_forward(self, after: Any = None) -> None:
        event = self._compute.record_event() if after is None else after
        for lane in self._lanes:
            lane.wait_event(event)

    def take_lane(self) -> int:
        lane, self._next_lane = self._next_lane, (self._next_lane + 1) % NUM_LANES
        return lane

    def gathering(self, lane: int) -> AbstractContextManager[Any]:
        event = self._last_use[lane]
        if event is not None:
            self._lanes[lane].wait_event(event)
        return self._lanes[lane]

    def gathered(self, lane: int) -> Any:
        return self._lanes[lane].record_event()

    def use(self, event: Any) -> None:
        if event is not None:
            self._compute.wait_event(event)

    def done_with(self, lane: int) -> None:
        self._last_use[lane] = self._compute.record_event()

    def start_reduction(self) -> None:
        while len(self._held) >= self.max_held:
            self._release_oldest()
        self._held.append([])

    def reducing(self) -> AbstractContextManager[Any]:
        self._reduce.wait_event(self._compute.record_event())
        return self._reduce

    def reduced(self, free_input: Callable[[], None]) -> None:
        self._held[-1].append((self._reduce.record_event(), free_input))

    def after_reduction(self) -> AbstractContextManager[Any]:
        return self._reduce

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        stream.wait_event(self._reduce.record_event())
        return _Joined(stream, self._reduce)

    def settle(self) -> None:
        while self._held:
            self._release_oldest()

    def finish_backward(self) -> None:
        self.settle()
        self._compute.wait_event(self._reduce.record_event())

    def _release_oldest(self) -> None:
        for event, free_input in self._held.popleft():
            self._compute.wait_event(event)
            free_input()


class _Joined:
    """Work in `stream` for which `main` waits afterwards."""

    def __init__(self, stream: Any, main: torch.Stream) -> None:
        self._stream, self._main = stream, main

    def __enter__(self) -> None:
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._main.wait_event(self._stream.record_event())
        self._stream.__exit__(*error)


def streams_of(device: torch.device) -> Streams:
    return Streams() if device.type in ("cpu", "meta") else DeviceStreams(device)
