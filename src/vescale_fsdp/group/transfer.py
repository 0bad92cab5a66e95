"""Moving one group's buffers between ranks, in place: gather shards into the whole, reduce the whole into shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from .. import _torch
from ..mesh import DataMesh
from .buffer import DBuffer
from .traffic import Traffic

__all__ = [
    "AllGather",
    "Division",
    "Gathering",
    "ReduceScatter",
    "all_reduce",
    "gather",
    "reduce_scatter",
]

AllGather = _torch.AllGather
ReduceScatter = _torch.ReduceScatter


@dataclass(frozen=True)
class Division:
    """How the sum over ranks becomes the gradient: divide before and after the collective, and reduce by `op` in it.

    The choices are FSDP2's, so that results are bit-equal: the collective's own average for float32 and bfloat16; for
    narrower ranges a power of two near sqrt(ranks) before and the rest after, so that nothing overflows.
    """

    before: float = 1.0
    after: float = 1.0
    op: Any = ReduceOp.SUM
    replicate_op: Any = ReduceOp.SUM

    @classmethod
    def choose(cls, mesh: DataMesh, dtype: torch.dtype, *, factor: float | None, sum_only: bool) -> Division:
        num_ranks = mesh.num_ranks * mesh.num_replicas
        if dtype in (torch.float32, torch.bfloat16) and not sum_only:
            if factor is None:
                return cls() if num_ranks == 1 else cls(op=ReduceOp.AVG, replicate_op=ReduceOp.AVG)
            if mesh.num_ranks > 1 and factor == mesh.num_ranks:
                return cls(op=ReduceOp.AVG)
            if mesh.num_ranks > 1 and mesh.backend == "nccl":
                return cls(op=_torch.premul_sum(1 / factor))
            return cls(after=factor)  # the backend has no PREMUL_SUM
        divisor = float(num_ranks) if factor is None else factor
        return cls(after=divisor) if dtype in (torch.float32, torch.bfloat16) else cls(*_split(divisor))


def _split(divisor: float) -> tuple[float, float]:
    """A power of two that divides `divisor` and is about its square root, and the rest."""
    before = 1
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return float(before), divisor / before


class Gathering:
    """A gather under way."""

    def __init__(self, *filled: torch.Tensor) -> None:
        self.works: list[dist.Work] = []
        self.staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Until the end of the wait: gloo's threads write, and count versions, whenever they get to it.
        self._guard = _torch.preserve_version(*filled)
        self._guard.__enter__()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.staged:
            with torch.no_grad():
                for target, staged in self.staged:
                    target.copy_(staged)
            self.staged.clear()
        self._guard.__exit__(None, None, None)


def gather(
    shard: DBuffer, whole: DBuffer, mesh: DataMesh, *, comm: AllGather | None, async_op: bool, traffic: Traffic
) -> Gathering:
    """Start to fill `whole` from every rank's `shard`; it is usable once the caller has waited.

    The input of the collective is the shard's own memory, or, where the dtype or device changes, this rank's slice of
    the output: one cast, and the gather is in place. One rank alone has only that copy. A user's `comm` gathers in
    memory that it allocates itself, from where the whole is copied.
    """
    gathering = Gathering(whole.flat)
    with torch.no_grad():
        for source, target in zip(shard.lanes, whole.lanes, strict=True):
            output = target
            if comm is not None and mesh.num_ranks > 1:
                output = comm.allocate((target.numel(),), dtype=target.dtype, device=target.device)
                gathering.staged.append((target, output))
                traffic.copied_bytes += target.numel() * target.itemsize
            is_elsewhere = source.dtype != target.dtype or source.device != target.device
            if output is not target or is_elsewhere or mesh.num_ranks == 1:
                mine = output.narrow(0, mesh.rank * source.numel(), source.numel())
                mine.copy_(source, non_blocking=True)
                traffic.copied_bytes += mine.numel() * mine.itemsize
                source = mine
            if mesh.num_ranks == 1:
                continue
            gather_into = _torch.all_gather if comm is None else partial(_call, comm)
            work = gather_into(output, source, group=mesh.group, async_op=async_op)
            if work is not None:
                gathering.works.append(work)
            traffic.gathers += 1
            traffic.gathered_bytes += target.numel() * target.itemsize
            traffic.wire_bytes += (mesh.num_ranks - 1) * source.numel() * source.itemsize
    return gathering


def _call(comm: AllGather, output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return comm(output_tensor=output, input_tensor=source, **kwargs)


def reduce_scatter(
    whole: DBuffer,
    targets: Sequence[torch.Tensor],
    mesh: DataMesh,
    division: Division,
    *,
    comm: ReduceScatter | None,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
) -> None:
    """Sum `whole` over ranks and keep this rank's part of each lane in `targets`; all have the dtype of the reduction.

    `group`: a process group of the same ranks for reductions alone, or None for the mesh's own. `comm`: a user's
    collective, which reduces memory that it allocates itself, or, if it says `is_in_place`, these very buffers.
    """
    if division.before != 1:
        whole.flat.div_(division.before)
    for source, target in zip(whole.lanes, targets, strict=True):
        if mesh.num_ranks == 1:
            target.copy_(source)
            continue
        over = group if group is not None else mesh.group
        if comm is None:
            _torch.reduce_scatter(target, source, op=division.op, group=over)
        elif getattr(comm, "is_in_place", False):
            _wait_for(comm(output_tensor=target, input_tensor=source, group=over, op=division.op))
        else:
            _reduce_staged(source, target, comm, over, division.op)
            traffic.copied_bytes += (source.numel() + target.numel()) * source.itemsize
        traffic.reduces += 1
        traffic.reduced_bytes += source.numel() * source.itemsize
        traffic.wire_bytes += (mesh.num_ranks - 1) * target.numel() * target.itemsize


def _reduce_staged(
    source: torch.Tensor, target: torch.Tensor, comm: ReduceScatter, group: dist.ProcessGroup, op: Any
) -> None:
    """Reduce through memory that the user's `comm` allocates."""
    given = comm.allocate((source.numel(),), dtype=source.dtype, device=source.device)
    taken = comm.allocate((target.numel(),), dtype=target.dtype, device=target.device)
    given.copy_(source)
    _wait_for(comm(output_tensor=taken, input_tensor=given, group=group, op=op))
    target.copy_(taken)


def _wait_for(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def all_reduce(shard: DBuffer, mesh: DataMesh, division: Division, *, traffic: Traffic) -> None:
    """Sum the shards of all replicas."""
    if mesh.replicate_group is None or mesh.num_replicas == 1:
        return
    dist.all_reduce(shard.flat, op=division.replicate_op, group=mesh.replicate_group)
    traffic.all_reduces += 1
    traffic.wire_bytes += 2 * (mesh.num_replicas - 1) * shard.nbytes // mesh.num_replicas
