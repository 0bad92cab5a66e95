"""One group's unsharded gradients on their way into the input of the reduction: each element is written there once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch
from ..home import Home
from ..layout import Layout
from .buffer import DBuffer

__all__ = ["Gradients"]


class Gradients:
    """The input of one group's reduction, in the dtype of the reduction; it exists from collecting to reducing.

    Gradients stay where autograd put them until the whole group's exist: by then the gathered parameters are freed, so
    that at most two of parameters, gradients and reduction input are alive at a time.
    """

    def __init__(self, layout: Layout, homes: Sequence[Home], *, dtype: torch.dtype, device: torch.device) -> None:
        self._homes = homes
        self._numels = [home.shape.numel() for home in homes]
        self.whole = DBuffer.whole(layout, self._numels, dtype=dtype, device=device)
        self._slots = [self.whole.view(i).view(home.shape) for i, home in enumerate(homes)]
        self.filled = [False] * len(self._slots)
        self.whole.free()

    def collect(self, params: Sequence[torch.Tensor]) -> int:
        """Move every `param.grad` into its place, or add it to what is held there; returns the bytes written."""
        found = [i for i, param in enumerate(params) if param.grad is not None]
        if not found:
            return 0
        self.whole.alloc()
        slots, grads, numel = [], [], 0
        for i in found:
            grad = params[i].grad
            assert grad is not None
            if self._homes[i].given is not None:
                grad = self._homes[i].local_gradient(grad, self.whole.dtype)
            slot = self._slots[i]
            if self.filled[i]:
                slot.add_(grad)
            else:
                slots.append(slot)
                grads.append(grad)
                self.filled[i] = True
            numel += self._numels[i]
        _torch.foreach_copy_(slots, grads)
        for i in found:
            params[i].grad = None
        return numel * self.whole.dtype.itemsize

    def slot(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where the caller writes gradient `index` itself, or adds it to the one that is there already, if any."""
        self.whole.alloc()
        was_filled, self.filled[index] = self.filled[index], True
        return self._slots[index], was_filled

    def hold(self, params: Sequence[torch.Tensor]) -> int:
        """Keep gradients for a later backward pass to add to, summed in the wider of their dtype and the reduction's.

        Where their own is as wide, autograd goes on adding to them where they are.
        """
        narrow = [
            param
            for param in params
            if param.grad is not None and torch.promote_types(param.grad.dtype, self.whole.dtype) != param.grad.dtype
        ]
        return self.collect(params) if narrow else 0

    def seal(self) -> list[bool]:
        """Make `whole` ready to be reduced: zeros where nothing came. Returns which tensors had a gradient."""
        self.whole.alloc()
        self.whole.zero_gaps()
        if not all(self.filled):
            for slot, filled in zip(self._slots, self.filled, strict=True):
                if not filled:
                    slot.zero_()
        return list(self.filled)

    def forget(self) -> None:
        """Nothing has been collected; `whole` stays until it is freed."""
        self.filled = [False] * len(self._slots)

    @property
    def any(self) -> bool:
        return True in self.filled
