"""Where ragged tensors meet files: DCP's questions, copies and pickles, full states of model and optimizer."""

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
    _torch.DATA_PTR.replace(_data_ptr)
    _torch.OPTIMIZER_STATE.replace(_optimizer_state)


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


ELEMENT_WISE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "ax", "prev", "step_size"),
}
"""What torch's optimizers keep for every element of a parameter."""


def _optimizer_state(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A state dict of one process has whole tensors; left like that, they fail beside shards at the next step."""

    def process(param: Any, value: Any, param_id: int, param_groups: list[dict[str, Any]], key: Any = None) -> Any:
        value = stock(param, value, param_id, param_groups, key)
        is_ragged = isinstance(param, DTensor) and seams.any_ragged(param.placements)
        if not is_ragged or key not in ELEMENT_WISE or type(value) is not torch.Tensor:
            return value
        return seams.shard_like(param, value, f"{key} of parameter {_name(param_id, param_groups)}")

    return process


def _name(param_id: int, param_groups: list[dict[str, Any]]) -> str:
    """The parameter's name, where the optimizer was made from named parameters, or its number."""
    for group in param_groups:
        if param_id in group["params"] and "param_names" in group:
            return str(group["param_names"][group["params"].index(param_id)])
    return str(param_id)


seams.installers.append(install)
