"""Exact counts for one training step: collectives, bytes on the wire, peak of live tensor bytes.

The same counters watch every engine, so their numbers mean the same:

- a collective is one call that reaches the process group; a barrier or a wait is none;
- wire bytes are what one rank sends when the collective runs as a ring, n ranks, payload p (the full tensor):
  all-gather and reduce-scatter (n-1)/n * p, all-reduce twice that, anything else (n-1)/n * p. A worked number: the
  all-gather of 4 MB over 4 ranks counts 3 MB. What the backend really does may differ;
- peak bytes are the largest sum of the live tensor storages of this process at any operation of the step: parameters,
  gradients, optimizer state, activations and communication buffers, without Python, libraries and the text.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_fsdp._torch import TorchDispatchMode

__all__ = ["StepMeter"]

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
KINDS = ("gather", "reduce", "alltoall", "all_to_all", "broadcast", "scatter")


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Counts what this rank does inside `with meter:`; slow, so it is switched on for a single step."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ranks = num_ranks
        self.collectives: Counter[str] = Counter()
        self.wire_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> StepMeter:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._see(thing)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._storages.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's signature
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first; its local operations come back here
        out = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVE_NAMESPACES:
            self._count(func.overloadpacket.__name__, args, out)
        for tensor in _tensors(out):
            self._see(tensor)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes())
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        if not any(kind in name for kind in KINDS):
            return
        nbytes = [sum(tensor.nbytes for tensor in _tensors(side)) for side in (*args[:2], out)]
        rounds = 2 if "allreduce" in name or "all_reduce" in name else 1
        self.collectives[name] += 1
        # The larger side is the full tensor: a gather's output, a reduce-scatter's input.
        self.wire_bytes += rounds * max(nbytes) * (self.num_ranks - 1) // self.num_ranks

    def _see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.to_local()
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            self._storages[id(storage)] = weakref.ref(storage)

    def _live_bytes(self) -> int:
        """Read anew each time: engines resize storages in place, which no operation reports."""
        total, dead = 0, []
        for key, reference in self._storages.items():
            storage = reference()
            if storage is None:
                dead.append(key)
            else:
                total += storage.nbytes()
        for key in dead:
            del self._storages[key]
        return total


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
