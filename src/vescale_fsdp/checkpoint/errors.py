"""What goes wrong with a checkpoint, in words that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..errors import VescaleError

__all__ = ["CheckpointError", "on_rank_0", "together"]

T = TypeVar("T")


class CheckpointError(VescaleError):
    """A checkpoint that is missing, damaged, newer than this version, or of another model."""


def together(work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results in rank order; an error on some ranks is raised on all.

    One gather of small objects: for facts and checks, never for tensors.
    """
    cause: Exception | None = None
    try:
        mine: tuple[T | None, str | None] = work(), None
    except Exception as error:  # whatever it is: the other ranks would wait
        cause = error
        mine = None, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    found: list[tuple[T | None, str | None]] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [mine] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    _raise_first([error for _, error in found], cause)
    return [result for result, _ in found]  # type: ignore[misc]  # no error: each has its result


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank; its error is raised on all."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return together(work)[0]
    return together(lambda: None)[0]  # type: ignore[return-value]  # rank 0's result, not ours


def _raise_first(errors: list[str | None], cause: Exception | None) -> None:
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failed:
        rank = min(failed)
        same = [str(other) for other, error in failed.items() if error == failed[rank]]
        where = f" (rank{'s' if len(same) > 1 else ''} {', '.join(same)} of {len(errors)})" if len(errors) > 1 else ""
        raise CheckpointError(failed[rank] + where) from cause
