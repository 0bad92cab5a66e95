"""One process per rank on this machine: started together, ended together.

A rank that fails ends the others at once; its traceback is the one that is shown, not that of a rank whose peer left.
A rank whose starter is gone (killed, say) ends itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["RankError", "launch", "run_rank"]

TIMEOUT_S = 300  # a collective that waits longer has lost a rank
GRACE_S = 2.0  # how long the other ranks may take to say that they failed too
MAX_TEXT = 20_000  # fits a pipe, so that sending never waits for a reader
PRELOADED = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "vescale_fsdp"]


class RankError(RuntimeError):
    """A rank raised or died; the text says which and why, with the rank's own traceback."""


def launch(work: Callable[[], None], num_ranks: int) -> None:
    """Run picklable `work` on `num_ranks` gloo ranks, and return when all have ended; RankError if any failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="vescale-fsdp-") as folder:
        workers: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                args = (work, rank, num_ranks, Path(folder) / "store", theirs)
                process: BaseProcess = context.Process(target=_start, args=args, name=f"rank {rank}")
                process.start()
                theirs.close()
                workers.append((process, ours))
            _await(workers)
        finally:
            for process, _ in workers:
                process.kill()
                process.join()


def run_rank(work: Callable[[], None], *, init_method: str = "env://", rank: int = -1, num_ranks: int = -1) -> None:
    """Run `work` inside a gloo process group; without arguments, the one that torchrun's variables describe."""
    import torch
    import torch.distributed as dist

    if sys.platform == "linux" and init_method != "env://":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.set_num_threads(max(1, _num_cores() // dist.get_world_size()))
    work()
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


def _start(work: Callable[[], None], rank: int, num_ranks: int, store: Path, report: Connection) -> None:
    """The whole life of one rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the starter decides
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        run_rank(work, init_method=store.as_uri(), rank=rank, num_ranks=num_ranks)
    except BaseException:
        report.send((time.monotonic(), traceback.format_exc()[-MAX_TEXT:]))
        sys.stdout.flush()
        os._exit(1)  # threads of the backend may still wait for a rank that is gone


def _end_with_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os._exit(1)


def _await(workers: list[tuple[BaseProcess, Connection]]) -> None:
    running = dict(enumerate(workers))
    failed: list[int] = []
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([process.sentinel for process, _ in running.values()], timeout=left)
        for rank in [rank for rank, (process, _) in running.items() if process.sentinel in ready]:
            process, _ = running.pop(rank)
            process.join()
            if process.exitcode:
                failed.append(rank)
                deadline = deadline or time.monotonic() + GRACE_S
    if failed:
        raise RankError(min(_failure(rank, *workers[rank]) for rank in failed)[1])


def _failure(rank: int, process: BaseProcess, report: Connection) -> tuple[float, str]:
    """When and why the rank ended; one that died without a word comes first, as the others failed for want of it."""
    try:
        when, text = report.recv()
    except EOFError:
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return 0.0, f"rank {rank} {how}"
    return when, f"{text}rank {rank} failed: {text.strip().splitlines()[-1]}"


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: what a container or taskset left us
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
