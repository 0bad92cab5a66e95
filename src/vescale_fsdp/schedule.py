"""Where one model is in its iteration, shared by the states of all its wrapped modules."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from .group.streams import Streams
from .group.traffic import Traffic

__all__ = ["Schedule"]

S = TypeVar("S")
"""The state of one `fully_shard` call."""


class Schedule(Generic[S]):
    """One model's iteration, shared by all its states: who runs forward, in which order states ran, what moved."""

    def __init__(self) -> None:
        self.states: list[S] = []
        self.forward_root: S | None = None
        self.order: list[S] = []
        """States in the order in which their forwards ended, once per forward."""
        self.last_order: list[S] = []
        """`order` at the end of the last forward that a backward follows."""
        self.begun: list[S] = []
        """States in the order in which they began in the running forward."""
        self.last_begun: list[S] = []
        """`begun` of the last forward that ran to its end."""
        self.num_forward_prefetch = 0
        """How many states to gather ahead in forward, in the order of `last_begun`."""
        self.is_last_backward = True
        self.end_is_queued = False
        self.traffic = Traffic()
        self.streams = Streams()
        self.post_optim_event: Any = None

    def begin(self, state: S) -> list[S]:
        """Note that the forward of `state` begins; returns those to gather ahead, unless the order has changed."""
        place = len(self.begun)
        self.begun.append(state)
        if not self.num_forward_prefetch or self.last_begun[: place + 1] != self.begun:
            return []
        return self.last_begun[place + 1 : place + 1 + self.num_forward_prefetch]

    @property
    def all_states(self) -> list[S]:
        """The name by which torch.distributed.pipelining knows `states`."""
        return self.states
