"""A reduce-scatter for gloo that sums in the memory it is given, instead of in a copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from . import _torch
from .errors import VescaleError

__all__ = ["InPlaceReduceScatter"]


class InPlaceReduceScatter(_torch.ReduceScatter):
    """All-reduces its input, which it overwrites, and keeps a share of it.

    gloo's own `reduce_scatter_tensor` does the same in a clone of the input: this gives the same bits in less time and
    memory. Other backends it refuses: there it would move several times what a true reduce-scatter moves.

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(InPlaceReduceScatter())
    """

    is_in_place = True
    """FSDP hands over its own buffers: nothing is allocated by, or copied for, this collective."""

    def check(self, group: dist.ProcessGroup) -> None:
        """Raises VescaleError unless gloo reduces in `group`."""
        backend = dist.get_backend(group)
        if backend != "gloo":
            raise VescaleError(
                f"InPlaceReduceScatter: expected a gloo process group, got {backend} over {group.size()} ranks, where "
                f"an all-reduce moves several times what a reduce-scatter does. Leave the default collective there."
            )

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.check(group)
        if async_op:
            raise NotImplementedError(
                "InPlaceReduceScatter: async_op=True is not built; the share is copied at the end"
            )
        averages = op == ReduceOp.AVG
        dist.all_reduce(input_tensor, op=ReduceOp.SUM if averages else op, group=group)
        numel = output_tensor.numel()
        share = input_tensor.view(-1).narrow(0, dist.get_rank(group) * numel, numel).view(output_tensor.shape)
        if averages:  # of the share alone, where gloo would divide all
            torch.div(share, group.size(), out=output_tensor)
        else:
            output_tensor.copy_(share)
