"""Tensor subclasses that define how they are gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as for FSDP2.

Their shards are whole rows, as many as the plan gives each rank; inputs need not be padded to equal sizes. An input
with as many dims as the parameter is taken to have one row per row of the shard, and its outputs arrive as one tensor;
any other input has the same shape on every rank, and its outputs arrive stacked along the first dim.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..mesh import DataMesh
from ..policy import MixedPrecisionPolicy
from .shards import Shards
from .traffic import Traffic

__all__ = ["ExtensionGather", "is_extension"]

ALIGNMENT_NBYTES = 16


def is_extension(tensor: torch.Tensor) -> bool:
    """Whether the tensor says itself how it is gathered; both methods or neither."""
    has = [hasattr(tensor, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
    if has[0] != has[1]:
        raise TypeError(f"{type(tensor).__name__} needs both fsdp_pre_all_gather and fsdp_post_all_gather, or neither")
    return has[0]


@dataclass
class _Input:
    """One tensor that a parameter sends: where its bytes lie in a rank's slice, and what they become."""

    dtype: torch.dtype
    begin: int
    nbytes: tuple[int, ...]
    """Of each rank."""
    output: torch.Tensor
    """What all ranks sent, in rank order; the same storage in every iteration, freed in between."""


class ExtensionGather:
    """Gathers the parameters of one group through their own methods; all their inputs travel as bytes in one call."""

    def __init__(self, shards: Shards, mesh: DataMesh, mp_policy: MixedPrecisionPolicy) -> None:
        self._shards = shards
        self._mesh = mesh
        self._mp_policy = mp_policy
        self._inputs: list[list[_Input]] = []
        self._share = 0
        self._inner: list[Sequence[torch.Tensor]] = []

    def start(self, *, async_op: bool, traffic: Traffic) -> _Under:
        """Ask every shard for its inputs and gather them."""
        with torch.no_grad():
            sent = [self._ask(i) for i in range(len(self._shards.params))]
            if not self._inputs:
                self._lay_out([inputs for inputs, _ in sent])
            num_ranks, rank = self._mesh.num_ranks, self._mesh.rank
            gathered = torch.empty(num_ranks * self._share, dtype=torch.uint8, device=self._mesh.device)
            mine = gathered.narrow(0, rank * self._share, self._share)
            for (tensors, _), inputs in zip(sent, self._inputs, strict=True):
                for tensor, each in zip(tensors, inputs, strict=True):
                    target = mine.narrow(0, each.begin, each.nbytes[rank]).view(each.dtype)
                    target.copy_(tensor.reshape(-1))
                    traffic.copied_bytes += each.nbytes[rank]
            works = []
            if num_ranks > 1 and self._share:
                work = _torch.all_gather(gathered, mine, group=self._mesh.group, async_op=async_op)
                works = [work] if work is not None else []
                traffic.gathers += 1
                traffic.gathered_bytes += gathered.numel()
                traffic.wire_bytes += (num_ranks - 1) * self._share
        return _Under(works, partial(self._receive, gathered, [metadata for _, metadata in sent], traffic))

    def make(self, metadata: Sequence[Any], dtype: torch.dtype, params: list[nn.Parameter]) -> list[torch.Tensor]:
        """The unsharded tensors: new ones if `params` is empty, else those parameters are filled again."""
        for inner in self._inner:
            for tensor in inner:
                _resize(tensor, tensor.numel() * tensor.itemsize)
        made = []
        for i, local in enumerate(self._shards.locals):
            outputs = tuple(each.output for each in self._inputs[i])
            finish: Any = getattr(local, "fsdp_post_all_gather")  # noqa: B009  (not an attribute of torch.Tensor)
            if params:
                finish(outputs, metadata[i], dtype, out=params[i])
            else:
                tensor, inner = finish(outputs, metadata[i], dtype)
                self._inner.append(inner)
                made.append(tensor)
        return made

    def free(self) -> None:
        for inputs in self._inputs:
            for each in inputs:
                _resize(each.output, 0)
        for inner in self._inner:
            for tensor in inner:
                _resize(tensor, 0)

    def _ask(self, index: int) -> tuple[Sequence[torch.Tensor], Any]:
        managed = self._shards.managed[index]
        local = self._shards.locals[index]
        if self._shards.is_offloaded:
            local = local.to(self._mesh.device, non_blocking=True)
        prepare: Any = getattr(local, "fsdp_pre_all_gather")  # noqa: B009  (not an attribute of torch.Tensor)
        if len(inspect.signature(prepare).parameters) == 1:
            inputs, metadata = prepare(self._mesh.shard_mesh)
        else:
            shape = managed.param.shape
            inputs, metadata = prepare(
                self._mesh.shard_mesh, shape, managed.param.stride(), managed.module, self._mp_policy
            )
        return inputs, metadata

    def _lay_out(self, sent: Sequence[Sequence[torch.Tensor]]) -> None:
        """Offsets in every rank's slice: each input takes what the rank with the most rows needs."""
        begin = 0
        for i, tensors in enumerate(sent):
            rows = self._rows(i)
            inputs = []
            for tensor in tensors:
                by_rows = tensor.ndim == self._shards.params[i].ndim
                row_nbytes = math.prod(tensor.shape[1:]) * tensor.itemsize
                if by_rows and tensor.shape[0] != rows[self._mesh.rank]:
                    raise NotImplementedError(
                        f"{self._shards.managed[i].fqn}: fsdp_pre_all_gather gave shape {tuple(tensor.shape)} for a "
                        f"shard of {rows[self._mesh.rank]} rows. Give as many rows, or fewer dims than the parameter."
                    )
                nbytes = (
                    [count * row_nbytes for count in rows]
                    if by_rows
                    else [tensor.numel() * tensor.itemsize] * len(rows)
                )
                first = sum(rows) if by_rows else len(rows) * (tensor.shape[0] if tensor.ndim else 1)
                with torch.inference_mode(False):
                    output = torch.empty(first, *tensor.shape[1:], dtype=tensor.dtype, device=self._mesh.device)
                inputs.append(_Input(tensor.dtype, begin, tuple(nbytes), output))
                begin += -(-max(nbytes) // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            self._inputs.append(inputs)
        self._share = begin

    def _rows(self, index: int) -> list[int]:
        """Rows of parameter `index` on every rank."""
        layout, numel = self._shards.layout, self._shards.numels[index]
        row = math.prod(self._shards.params[index].shape[1:]) or 1
        return [len(layout.shard_range(index, numel, rank)) // row for rank in range(self._mesh.num_ranks)]

    def _receive(self, gathered: torch.Tensor, metadata: list[Any], traffic: Traffic) -> list[Any]:
        """Bring the pieces of each input together; returns what the shards' methods wanted to remember."""
        with torch.no_grad():
            for inputs in self._inputs:
                for each in inputs:
                    _resize(each.output, each.output.numel() * each.output.itemsize)
                    with _torch.preserve_version(each.output):
                        flat, done = each.output.view(-1), 0
                        for rank, nbytes in enumerate(each.nbytes):
                            piece = gathered.narrow(0, rank * self._share + each.begin, nbytes).view(each.dtype)
                            flat.narrow(0, done, piece.numel()).copy_(piece)
                            done += piece.numel()
                    traffic.copied_bytes += flat.numel() * flat.itemsize
        return metadata


class _Under:
    """A gather under way; `wait` gives the metadata for `make`."""

    def __init__(self, works: list[dist.Work], receive: Any) -> None:
        self._works = works
        self._receive = receive

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        return self._receive()


def _resize(tensor: torch.Tensor, nbytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)
