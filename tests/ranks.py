"""One pool of gloo worker processes for the whole test run: `@ranks(2, 4)` runs a test's body on every rank.

The body is looked up in its file by name, so it must be a module-level function; keyword arguments (from
`pytest.mark.parametrize`) travel by pickle. Inside it the default process group exists:

    @ranks(1, 2, 4)
    def test_gather_returns_the_full_tensor() -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ...

Each run re-initialises the process group with its own store prefix. A failing or hanging rank ends the pool; the next
test starts a fresh one. A worker whose test left process groups behind is replaced: each group has threads that wake a
hundred times a second.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

TIMEOUT_S = 120.0
GRACE_S = 5.0
MAX_THREADS = 4
"""Of a worker between tests: its own, and those of one gloo group."""
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.nn",  # the defaults of its functions keep the default group that exists when it is imported
    "torch.distributed.tensor",
    "pytest",
    "vescale_fsdp",
]


def ranks(*world_sizes: int, timeout_s: float = TIMEOUT_S) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test body on every rank of a gloo group, once for each of `world_sizes`."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("num_ranks", world_sizes, ids=lambda n: f"{n}ranks")
        @functools.wraps(body)
        def test(rank_pool: RankPool, num_ranks: int, **kwargs: Any) -> None:
            rank_pool.run(num_ranks, body.__code__.co_filename, body.__qualname__, kwargs, timeout_s)

        names = ["rank_pool", "num_ranks", *inspect.signature(body).parameters]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


class RankPool:
    """Worker processes 0..n-1, started when first needed and reused by every test."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[tuple[Any, Connection]] = []
        self.threads: list[int] = []
        """Of each rank, after the last run that went well."""
        self._store: Any = None
        self._runs = 0

    def run(self, num_ranks: int, path: str, name: str, kwargs: dict[str, Any], timeout_s: float = TIMEOUT_S) -> None:
        """Run function `name` of the file at `path` on `num_ranks` ranks; raise what the first failing rank raised."""
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < num_ranks:
            self._workers.append(self._started(len(self._workers)))
        self._runs += 1
        task = (num_ranks, self._store.port, f"run{self._runs}", path, name, kwargs)
        connections = [connection for _, connection in self._workers[:num_ranks]]
        for connection in connections:
            connection.send(task)
        failures = self._collect(connections, timeout_s)
        skips = [text for kind, text in failures.values() if kind == "skip"]
        if failures and len(skips) < len(connections):
            self.close()
        else:
            self._replace_crowded()
        if not failures:
            return
        if len(skips) == len(failures):
            pytest.skip(skips[0])
        text = "\n".join(f"--- rank {rank} of {num_ranks}\n{text}" for rank, (_, text) in sorted(failures.items()))
        pytest.fail(text, pytrace=False)

    @property
    def pids(self) -> list[int]:
        """Of the workers, by rank."""
        return [process.pid for process, _ in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            _end(*worker)
        self._workers.clear()

    def _replace_crowded(self) -> None:
        for rank, count in enumerate(self.threads):
            if count > MAX_THREADS:
                _end(*self._workers[rank])
                self._workers[rank] = self._started(rank)

    def _started(self, rank: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(rank, theirs, list(sys.path)), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, connections: list[Connection], timeout_s: float) -> dict[int, tuple[str, str]]:
        """Failures by rank; a rank that has not answered soon after another failed counts as waiting for it."""
        pending = dict(enumerate(connections))
        failures: dict[int, tuple[str, str]] = {}
        self.threads = [0] * len(connections)
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = {rank: ("error", "no answer: it hangs, or waits for a failed rank") for rank in pending}
                return failures | late
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                try:
                    kind, text, self.threads[rank] = pending.pop(rank).recv()
                except EOFError:
                    kind, text = "error", "the worker process died"
                if kind != "ok":
                    failures[rank] = (kind, text)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return failures


def _end(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


def _work(rank: int, connection: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    caches = _torch_caches()
    gc.freeze()  # so that the collection after every task looks at that task's objects alone
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        kind, text = _run_task(rank, *task)
        _forget_meshes(caches)
        connection.send((kind, text, len(os.listdir("/proc/self/task"))))


def _torch_caches() -> list[Any]:
    """torch's caches of functions of DTensors and meshes, by type: there is no list of them."""
    import torch.distributed.tensor  # noqa: F401

    found = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [each for each in found if str(each.__module__).startswith("torch.distributed.")]


def _forget_meshes(caches: list[Any]) -> None:
    """Let go of what holds meshes: those of the next run will equal these, whose process groups are gone."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from ragged_dtensor.ops import _answers

    _clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", bool)()  # newer than torch 2.11
    _answers._found.clear()
    for cache in caches:
        cache.cache_clear()
    gc.collect()  # wrapped modules are cycles


def _run_task(
    rank: int, num_ranks: int, port: int, prefix: str, path: str, name: str, kwargs: dict[str, Any]
) -> tuple[str, str]:
    import torch
    import torch.distributed as dist

    try:
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S / 2)
        )
        torch.manual_seed(0)
        function = getattr(_load(path), name)
        getattr(function, "body", function)(**kwargs)
        dist.barrier()  # no rank leaves while another still talks to it
        dist.destroy_process_group()
    except pytest.skip.Exception as skipped:
        dist.destroy_process_group()
        return "skip", str(skipped)
    except BaseException:
        return "error", traceback.format_exc()
    return "ok", ""


@functools.cache
def _load(path: str) -> Any:
    name = "ranked_" + path.replace(os.sep, "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
