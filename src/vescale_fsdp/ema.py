"""An exponential moving average of a wrapped model's weights, kept in shards: what deepcopy is for in other models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_dtensor import distribute_tensor

from . import _torch
from .errors import VescaleError
from .module import FSDPModule

__all__ = ["ShardedEMA"]


class ShardedEMA:
    """`average = decay * average + (1 - decay) * weight`, as torch's AveragedModel with `get_ema_multi_avg_fn`.

    Averages are DTensors placed as their parameters: an update communicates nothing, and a rank keeps as much again as
    its shards. `state_dict()` names them as the model does, so they save, load and gather (`full_tensor`) like it.

        ema = ShardedEMA(model, decay=0.999)      # after fully_shard and after loading
        optimizer.step(); ema.update()
        with ema.swapped():                       # the model runs with the averages
            evaluate(model)
    """

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise VescaleError(f"decay is between 0 and 1, got {decay}")
        self.decay = decay
        self._module = module
        self._averages = {name: param.detach().clone() for name, param in self._params().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take one step towards the weights; call it after the optimizer's."""
        averages, weights = self._paired()
        _torch.foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange weights and averages, and exchange them back at the end; do not train in between."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy in what `state_dict` returned, under any sharding over the same mesh, or whole tensors on every rank.

        Raises VescaleError, naming the average, before anything changes.
        """
        if differing := sorted(state_dict.keys() ^ self._averages.keys()):
            raise VescaleError(f"the averages and the state dict differ in {differing}. Load averages of this model.")
        values = {name: _placed(name, state_dict[name], average) for name, average in self._averages.items()}
        for name, average in self._averages.items():
            average.copy_(values[name])

    @torch.no_grad()
    def _swap(self) -> None:
        averages, weights = self._paired()
        for average, weight in zip(averages, weights, strict=True):
            kept = average.clone()
            average.copy_(weight)
            weight.copy_(kept)

    def _paired(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Local averages and weights, in the same order."""
        params = self._params()
        if params.keys() != self._averages.keys():
            raise VescaleError("the model's parameters are not those that the averages were made for; make new ones")
        return [_local(each) for each in self._averages.values()], [_local(params[name]) for name in self._averages]

    def _params(self) -> dict[str, nn.Parameter]:
        """The model's parameters, which are freed first where they are gathered."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                for group in module._groups():
                    group.to_sharded()
        return dict(self._module.named_parameters())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _placed(name: str, value: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """`value`, cut as the average is."""
    if value.shape != average.shape:
        raise VescaleError(f"{name}: expected shape {tuple(average.shape)}, the state dict has {tuple(value.shape)}")
    if not isinstance(average, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        whole = value.to(average.device)
        return distribute_tensor(whole, average.device_mesh, average.placements, src_data_rank=None)
    if value.device_mesh != average.device_mesh:
        raise VescaleError(
            f"{name}: expected a DTensor on {average.device_mesh}, got one on {value.device_mesh}. Load it through "
            f"torch.distributed.checkpoint, or give full_tensor()."
        )
    return value.redistribute(placements=average.placements)
