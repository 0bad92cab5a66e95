"""One group's unsharded gradients on their way into the input of the reduction: each element is written there once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch
from ..home import Home
from ..layout import Layout
from .buffer import DBuffer
from .portions import Portion, cut_into_portions, largest_portion

__all__ = ["Gradients", "num_portions", "portion_nbytes"]

ALIGNMENT_NBYTES = 16
MAX_PORTIONS = 8
MIN_NBYTES = 64 * 2**20
"""Inputs below this, or below a 64th of it for each rank, are reduced at once: more messages would cost more time than
their memory is worth."""


def num_portions(layout: Layout, dtype: torch.dtype, compute_dtype: torch.dtype) -> int:
    """In how many portions a reduction in `dtype` takes its input.

    So many that a portion takes the place of the gathered parameters, which are freed by then; on up to four ranks so
    many that it takes what the result, a large share there, leaves of that place. Sums of 4 bytes of parameters of 2:

        7 or more ranks 2    5 or 6 ranks 3    4 ranks 4    3 ranks 6    2 ranks 8
    """
    nbytes = layout.num_ranks * layout.share * dtype.itemsize
    if dtype.itemsize <= compute_dtype.itemsize or nbytes < MIN_NBYTES * max(1, layout.num_ranks // 64):
        return 1
    room = layout.num_ranks * compute_dtype.itemsize - dtype.itemsize
    portions = layout.num_ranks * dtype.itemsize // room if room > 0 else MAX_PORTIONS
    return min(max(portions, -(-dtype.itemsize // compute_dtype.itemsize)), MAX_PORTIONS)


def portion_nbytes(layout: Layout, dtype: torch.dtype, num_portions: int) -> int:
    """Of the largest portion."""
    return largest_portion(layout, num_portions, align=ALIGNMENT_NBYTES // dtype.itemsize) * dtype.itemsize


class Gradients:
    """The input of one group's reduction, in the dtype of the reduction, in portions: each exists until it is reduced.

    Gradients stay where autograd put them until the whole group's exist: by then the gathered parameters are freed, and
    a portion takes their place. So at most two of parameters, gradients and a portion are alive at a time.
    """

    def __init__(
        self, layout: Layout, homes: Sequence[Home], *, dtype: torch.dtype, device: torch.device, num_portions: int = 1
    ) -> None:
        self._homes = homes
        self.dtype = dtype
        self.device = device
        self._numels = [home.shape.numel() for home in homes]
        portions = cut_into_portions(layout, self._numels, num_portions, align=ALIGNMENT_NBYTES // dtype.itemsize)
        self.inputs = [ReductionInput(each, homes, dtype=dtype, device=device) for each in portions]
        self.filled = [False] * len(homes)

    def take(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What the ranks have to sum of every `param.grad`, which is None from now on."""
        taken = {}
        for i, param in enumerate(params):
            if param.grad is not None:
                grad = param.grad
                taken[i] = grad if self._homes[i].given is None else self._homes[i].local_gradient(grad, self.dtype)
        for i in taken:
            params[i].grad = None
        return taken

    def nbytes(self, grads: dict[int, torch.Tensor]) -> int:
        """Bytes that are written for them."""
        return sum(self._numels[i] for i in grads) * self.dtype.itemsize

    def slot(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where the caller writes gradient `index` itself, or adds it to the one that is there already, if any.

        For gradients in the dtype of the reduction, whose input is one portion.
        """
        (whole,) = self.inputs
        was_filled, self.filled[index] = self.filled[index], True
        return whole.slot(index), was_filled

    def hold(self, params: Sequence[torch.Tensor]) -> int:
        """Keep gradients for a later backward pass to add to, summed in the wider of their dtype and the reduction's.

        Where their own is as wide, autograd goes on adding to them where they are. Returns the bytes written.
        """
        if not any(
            param.grad is not None and torch.promote_types(param.grad.dtype, self.dtype) != param.grad.dtype
            for param in params
        ):
            return 0
        grads = self.take(params)
        for each in self.inputs:
            each.put(grads, self.filled)
        for i in grads:
            self.filled[i] = True
        return self.nbytes(grads)

    def forget(self) -> None:
        """Nothing is held; the inputs stay until they are freed."""
        self.filled = [False] * len(self.filled)

    @property
    def any(self) -> bool:
        return True in self.filled


class ReductionInput:
    """One portion's memory; each tensor is a slice of it, or several where the portion takes pieces of it."""

    def __init__(self, portion: Portion, homes: Sequence[Home], *, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = portion.columns
        self._blocks = portion.blocks
        spans = [block.span for blocks in portion.blocks for block in blocks]
        self.buffer = DBuffer(portion.lane_numels, spans, dtype=dtype, device=device)
        views = iter([self.buffer.view(i) for i in range(len(spans))])
        self._slots = [[next(views).view(block.rows, block.width) for block in blocks] for blocks in portion.blocks]
        self._is_dense = all(portion.holds(i, home.shape.numel()) for i, home in enumerate(homes))
        if self._is_dense:
            self._slots = [[slot.view(home.shape)] for (slot,), home in zip(self._slots, homes, strict=True)]
        self.buffer.free()

    def put(self, grads: dict[int, torch.Tensor], filled: Sequence[bool]) -> None:
        """Write the elements of `grads`, or add them to those of tensors that are `filled`."""
        if not grads:
            return
        self.buffer.alloc()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for i, grad in grads.items():
            pieces = [grad] if self._is_dense else self._pieces(i, grad)
            if filled[i]:
                for slot, piece in zip(self._slots[i], pieces, strict=True):
                    slot.add_(piece)
            else:
                targets += self._slots[i]
                sources += pieces
        _torch.foreach_copy_(targets, sources)

    def slot(self, index: int) -> torch.Tensor:
        """The memory of a tensor that lies here as a whole."""
        self.buffer.alloc()
        (slot,) = self._slots[index]
        return slot

    def columns_of(self, shard: DBuffer) -> list[torch.Tensor]:
        """What a rank's share of this portion is of its share of each lane."""
        return [lane.narrow(0, each.begin, len(each)) for lane, each in zip(shard.lanes, self._columns, strict=True)]

    def _pieces(self, index: int, grad: torch.Tensor) -> list[torch.Tensor]:
        flat = grad.reshape(-1)
        first = flat.storage_offset()
        return [
            flat.as_strided((block.rows, block.width), (block.stride, 1), first + block.begin)
            for block in self._blocks[index]
        ]

    def seal(self, filled: Sequence[bool]) -> None:
        """Make the memory ready to be reduced: zeros where nothing came."""
        self.buffer.alloc()
        self.buffer.zero_gaps()
        if not all(filled):
            for slots, is_filled in zip(self._slots, filled, strict=True):
                if not is_filled:
                    for slot in slots:
                        slot.zero_()
