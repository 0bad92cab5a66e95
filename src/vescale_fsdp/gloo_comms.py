"""Reduce-scatters for gloo, whose own all-reduces a copy of the input: one without the copy, one that moves half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from . import _torch
from .errors import VescaleError

__all__ = ["ExchangeReduceScatter", "GlooReduceScatter", "InPlaceReduceScatter"]


class GlooReduceScatter(_torch.ReduceScatter):
    """What both have in common: they are called with FSDP's own buffers, and refuse other backends.

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ExchangeReduceScatter())
    """

    is_in_place = True
    """FSDP hands over its own buffers: nothing is allocated by `allocate`, or copied, for this collective."""

    def check(self, group: dist.ProcessGroup) -> None:
        """Raises VescaleError unless gloo reduces in `group`."""
        backend = dist.get_backend(group)
        if backend != "gloo":
            raise VescaleError(
                f"{type(self).__name__}: expected a gloo process group, got {backend} over {group.size()} ranks, whose "
                f"own reduce-scatter is faster. Leave the default collective there."
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
            raise NotImplementedError(f"{type(self).__name__}: async_op=True is not built; work is left at the end")
        self._reduce(output_tensor.view(-1), input_tensor.view(-1), group, op)

    def _reduce(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
        raise NotImplementedError


class InPlaceReduceScatter(GlooReduceScatter):
    """All-reduces its input, which it overwrites, and keeps a share of it.

    gloo's own `reduce_scatter_tensor` does the same in a clone of the input: this gives the same bits in less time and
    memory.
    """

    def _reduce(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
        averages = op == ReduceOp.AVG
        dist.all_reduce(input, op=ReduceOp.SUM if averages else op, group=group)
        share = input.narrow(0, dist.get_rank(group) * output.numel(), output.numel())
        if averages:  # of the share alone, where gloo would divide all
            torch.div(share, group.size(), out=output)
        else:
            output.copy_(share)


class ExchangeReduceScatter(GlooReduceScatter):
    """Gives every rank its share of all inputs, which then adds them: half of what an all-reduce moves.

    It takes a buffer as large as the input, as gloo's own does. Shares are added in the order of ranks, in float32 if
    they are narrower: the bits of gloo's own on two ranks; on more they differ from it in rounding, and do not depend
    on where an element lies. Only sums and averages.
    """

    def _reduce(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"ExchangeReduceScatter: expected a sum or an average, got {op}")
        received = torch.empty_like(input)
        dist.all_to_all_single(received, input, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output.dtype, out=output)
        if op == ReduceOp.AVG:
            output.div_(group.size())
