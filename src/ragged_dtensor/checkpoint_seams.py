"""Where ragged tensors meet files: DCP's questions, what copies and pickles them, full states of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from ragged_dtensor import _torch
from ragged_dtensor._torch import Point, seams


def install() -> None:
    _ask(_torch.WRITE_ITEMS, lambda tensor, fqn, _: seams.write_items(tensor, fqn))
    _ask(_torch.CHUNK_LIST, lambda tensor: seams.chunk_list(tensor))
    _ask(_torch.TENSOR_SHARD, lambda tensor, index: seams.tensor_shard(tensor, index))
    _torch.FULL_STATE.replace(_full_state)
    _torch.DATA_PTR.replace(_data_ptr)


def _ask(point: Point, ours: Callable[..., Any]) -> None:
    """Torch's default answers would say that every rank holds the whole tensor."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: DTensor, *args: Any) -> Any:
            return ours(self, *args) if seams.any_ragged(self.placements) else stock(self, *args)

        return method

    point.replace(make)


def _data_ptr(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Zero tells torch.save, pickle, deepcopy and `async_save` that a tensor has no memory of its own.

    Stock DTensors say it only while their local tensor does not begin inside a buffer.
    """

    def data_ptr(self: DTensor) -> int:
        return 0 if seams.any_ragged(self.placements) else stock(self)

    return data_ptr


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
