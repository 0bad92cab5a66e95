"""Work for a rank that fails, in a file of its own so that a started process can import it."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist


def fail_on_rank(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("rank one says no")
    dist.barrier()
