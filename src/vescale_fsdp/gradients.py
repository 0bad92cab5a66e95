"""One group's unsharded gradients: each written once, straight into the input of the reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buffer import DBuffer
from .layout import Layout

__all__ = ["Gradients", "OwnGradients"]


class Gradients:
    """Where autograd's gradients go as soon as they exist, so that they are freed one by one.

    `whole` has the dtype of the reduction. Gradients held over several backward passes without communication are summed
    in a buffer as wide as the wider of gradient and reduction: sums do not lose what the wire would.
    """

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[torch.Size],
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._shapes = tuple(shapes)
        self._device = device
        self.whole, self._slots = self._new_buffer(reduce_dtype)
        self._held: DBuffer | None = None
        self._wide = torch.promote_types(dtype, reduce_dtype)
        self._target, self._target_slots = self.whole, self._slots
        self.filled = [False] * len(self._shapes)

    def take(self, index: int, param: torch.Tensor, *, hold: bool) -> int:
        """Move `param.grad` into its place and return the bytes written.

        `hold` says that the next reduction comes after a later backward pass.
        """
        grad = param.grad
        assert grad is not None
        if hold and self._wide != self._target.dtype:
            self._widen()
        self._target.alloc()
        slot = self._target_slots[index]
        if self.filled[index]:
            slot.add_(grad)
        else:
            slot.copy_(grad)
            self.filled[index] = True
        param.grad = None
        return slot.numel() * slot.itemsize

    def seal(self) -> list[int]:
        """Make `whole` ready to be reduced: zeros where nothing came. Returns the tensors that had a gradient."""
        self._target.alloc()
        self._target.zero_gaps()
        for slot, filled in zip(self._target_slots, self.filled, strict=True):
            if not filled:
                slot.zero_()
        if self._held is not None:
            self.whole.alloc()
            self.whole.flat.copy_(self._held.flat)
            self._forget_held()
        return [i for i, filled in enumerate(self.filled) if filled]

    def forget(self) -> None:
        """Nothing has been taken; `whole` stays until it is freed."""
        self._forget_held()
        self.filled = [False] * len(self._shapes)

    def clear(self) -> None:
        """Forget every gradient and free the memory."""
        self.forget()
        self.whole.free()

    @property
    def any(self) -> bool:
        return True in self.filled

    def _widen(self) -> None:
        """From now on sum in the wider dtype."""
        self._held, slots = self._new_buffer(self._wide)
        if self.any:
            self._held.flat.copy_(self._target.flat)
        self._target.free()
        self._target, self._target_slots = self._held, slots

    def _forget_held(self) -> None:
        self._held = None
        self._target, self._target_slots = self.whole, self._slots

    def _new_buffer(self, dtype: torch.dtype) -> tuple[DBuffer, list[torch.Tensor]]:
        numels = [shape.numel() for shape in self._shapes]
        buffer = DBuffer.whole(self._layout, numels, dtype=dtype, device=self._device)
        return buffer, [buffer.view(i).view(shape) for i, shape in enumerate(self._shapes)]


class OwnGradients:
    """The gradients of a group that no other rank shares: autograd's own tensors, neither copied nor reduced."""

    def __init__(self, num_tensors: int) -> None:
        self._grads: list[torch.Tensor | None] = [None] * num_tensors

    def take(self, index: int, param: torch.Tensor, *, hold: bool) -> int:
        """Keep `param.grad` itself; nothing is written."""
        grad = param.grad
        held = self._grads[index]
        self._grads[index] = grad if held is None or grad is None else held.add_(grad)
        param.grad = None
        return 0

    def pop(self) -> list[torch.Tensor | None]:
        """The gradients, by parameter; forgets them."""
        grads, self._grads = self._grads, [None] * len(self._grads)
        return grads

    def clear(self) -> None:
        self.pop()

    @property
    def any(self) -> bool:
        return any(grad is not None for grad in self._grads)
