"""Lets a peer that always asks for CUDA streams and events run on the CPU: they do nothing there, and cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["install"]


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> _Event:
        return self

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Device(str):
    """A device for `device=`, a number inside "cuda:{...}"."""

    def __format__(self, spec: str) -> str:
        return "0"


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Replace what torch.cuda offers of streams, in this process; nothing on a machine with CUDA."""
    cuda: Any = torch.cuda
    if cuda.is_available() or cuda.Stream is _Stream:
        return
    import torch._dynamo.trace_rules as rules  # its map has the original functions as keys

    rules.get_torch_obj_rule_map()
    stream = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.stream = cuda.device = cuda.use_mem_pool = _nothing
    cuda.current_device = lambda: _Device("cpu")
    cuda.synchronize = cuda.empty_cache = cuda.set_device = lambda *args: None
    cuda.memory_allocated = cuda.memory_reserved = lambda *args: 0
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    tensor.cuda = lambda self, *args, **kwargs: self
