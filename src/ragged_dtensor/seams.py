"""What torch asks about ragged tensors: a table that later files fill with answers and `_torch` asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from ragged_dtensor.errors import RaggedShardError


def _unfilled(*args: object, **kwargs: object) -> NoReturn:
    raise RaggedShardError("ragged_dtensor is only partly imported. Import the package, not one of its files.")


@dataclass
class Seams:
    """Our answers to torch's questions about ragged tensors; each later file of the package fills in its own.

    is_ragged(placement) -> bool
    local_shape(shape, mesh, placements) -> the local shape on this rank
    global_shape(local, mesh, placements) -> the full shape, or an error that says why it cannot be inferred
    redistribute(local, current_spec, target_spec, *, async_op) -> the new local tensor
    distribute(tensor, mesh, placements, *, src_data_rank) -> a new DTensor
    answer(op, args, kwargs, op_info) -> an OutputSharding with tensor meta, which torch caches and carries out, or
        anything else: the op's result
    installers: called once, when the first RaggedShard is built, to lead torch here
    safe_globals: what `torch.load(weights_only=True)` may call to rebuild a placement
    write_items(dtensor, fqn), chunk_list(dtensor), tensor_shard(dtensor, index): DCP's three questions
    place_full(dtensor, full) -> the DTensor with the values of a full tensor that every rank holds
    shard_like(param, full, name) -> a full tensor that every rank holds, cut as the parameter is
    """

    is_ragged: Callable[[object], bool] = lambda placement: False
    local_shape: Callable[..., tuple[int, ...]] = _unfilled
    global_shape: Callable[..., tuple[int, ...]] = _unfilled
    redistribute: Callable[..., torch.Tensor] = _unfilled
    distribute: Callable[..., DTensor] = _unfilled
    answer: Callable[..., Any] = _unfilled
    write_items: Callable[..., list[Any]] = _unfilled
    chunk_list: Callable[..., list[Any]] = _unfilled
    tensor_shard: Callable[..., torch.Tensor] = _unfilled
    place_full: Callable[..., DTensor] = _unfilled
    shard_like: Callable[..., DTensor] = _unfilled
    safe_globals: tuple[Any, ...] = ()
    installers: list[Callable[[], None]] = field(default_factory=list)

    def any_ragged(self, placements: Sequence[object] | None) -> bool:
        return any(map(self.is_ragged, placements or ()))


seams = Seams()
