"""Where ragged tensors meet checkpoints: DCP's questions, the staging of `async_save`, full states of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_dtensor import _torch
from ragged_dtensor._torch import Point, seams


def install() -> None:
    _ask(_torch.WRITE_ITEMS, lambda tensor, fqn, _: seams.write_items(tensor, fqn))
    _ask(_torch.CHUNK_LIST, lambda tensor: seams.chunk_list(tensor))
    _ask(_torch.TENSOR_SHARD, lambda tensor, index: seams.tensor_shard(tensor, index))
    _torch.FULL_STATE.replace(_full_state)
    staging = _torch.staging_point()
    if staging is not None:
        staging.replace(_staging)


def _ask(point: Point, ours: Callable[..., Any]) -> None:
    """Torch's default answers would say that every rank holds the whole tensor."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: DTensor, *args: Any) -> Any:
            return ours(self, *args) if seams.any_ragged(self.placements) else stock(self, *args)

        return method

    point.replace(make)


def _staging(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`async_save` takes a DTensor whose shard begins inside a buffer for a plain tensor: its data_ptr() is not 0."""

    def offload(self: Any, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(x, DTensor) or not seams.any_ragged(x.placements):
            return stock(self, x, memo, non_blocking=non_blocking)  # type: ignore[no-any-return]
        local = self.deepcopy_with_tensor_offload(_torch.local_of(x), memo, non_blocking=non_blocking)
        memo[id(x)] = staged = _torch.new_dtensor(local, _torch.spec_of(x), requires_grad=False)
        return staged

    return offload


def _full_state(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Full state dicts broadcast from rank 0 are sliced by one box per rank, which a ragged shard is not."""

    def distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        others = []
        for key in keys:
            found = local_state_dict.get(key)
            if isinstance(found, tuple) and seams.any_ragged(found[0].placements):
                local_state_dict[key] = seams.place_full(*found)
            else:
                others.append(key)
        stock(local_state_dict, others, *args, **kwargs)

    return distribute_tensors


seams.installers.append(install)
