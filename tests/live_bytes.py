"""What a step really holds and moves, seen from outside: storages and collectives of any engine, by operation."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: most bytes of tensor storages alive at once, those of before included; resized storages are followed.

    `trace`: every storage and the bytes that it has from then on, in order; 0 when it is gone.
    `calls` and `nbytes`: collectives, and bytes of the whole tensors that they gathered or reduced, by kind. What gloo
    allocates for itself, and shows while it is waited for, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.trace: list[tuple[int, int]] = []
        self._live = 0
        self._num_seen = 0
        self._is_waiting = False
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}

    def __enter__(self) -> LiveBytes:
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._see(thing)
        self.peak = self._live
        self._resize = torch.UntypedStorage.resize_
        meter = self

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = meter._resize(storage, nbytes)
            meter._note(storage)
            return result

        self._wait = Work.wait

        def wait(work: Work, *args: Any) -> Any:
            meter._is_waiting = True
            try:
                return meter._wait(work, *args)
            finally:
                meter._is_waiting = False

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        Work.wait = wait  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        Work.wait = self._wait  # type: ignore[method-assign]
        super().__exit__(*error)
        self._seen.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not self._is_waiting:
                self._see(tensor)
        return out

    def _count(self, name: str, args: Any) -> None:
        for kind in ("allgather", "reduce_scatter", "allreduce"):
            if kind in name:
                sides = [sum(each.nbytes for each in tree_leaves(side) if torch.is_tensor(each)) for side in args[:2]]
                self.calls[kind] += 1
                self.nbytes[kind] += max(sides)

    def _see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if type(tensor) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and tensor.device.type == "cpu":
            self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._num_seen += 1
            reference, number, before = weakref.ref(storage, lambda _: self._forget(key)), self._num_seen, 0
        else:
            reference, number, before = self._seen[key]
        self._seen[key] = reference, number, nbytes
        if nbytes != before:
            self._change(number, before, nbytes)

    def _forget(self, key: int) -> None:
        if key in self._seen:
            _, number, nbytes = self._seen.pop(key)
            self._change(number, nbytes, 0)

    def _change(self, number: int, before: int, nbytes: int) -> None:
        self.trace.append((number, nbytes))
        self._live += nbytes - before
        self.peak = max(self.peak, self._live)


def live_now() -> int:
    """Bytes of all tensor storages that are alive."""
    return measure(lambda: None).peak


def measure(step: Callable[[], object]) -> LiveBytes:
    """The meter after `step` ran in it."""
    gc.collect()
    with LiveBytes() as meter:
        step()
    return meter
