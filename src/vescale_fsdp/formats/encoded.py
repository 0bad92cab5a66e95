"""A tensor that is held in a block format, and modules that compute with its codes and scales themselves.

    weight = EncodedTensor(payload, scales, format, ...)
    weight.payload, weight.scales         what it holds
    x @ weight.mT                         decodes first, as every operation does that is not listed below

Moving it (`to`, `cuda`), changing its dtype, `detach` and `empty_like` on another device keep the codes. `copy_`
encodes what it is given, once. Nothing else may write into it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from .. import _torch
from ..errors import VescaleError
from ..nested import map_tensors
from .block_format import BlockFormat, decode_into, encode_into

__all__ = ["EncodedTensor", "TakesEncoded", "takes_encoded"]

aten = torch.ops.aten


@runtime_checkable
class TakesEncoded(Protocol):
    """A module whose forward computes with the codes and scales of some of its own parameters.

    `encoded_params` names them ("weight"). Where `param_policy` gives such a parameter a format, forward and backward
    find an `EncodedTensor` in its place, and nothing is decoded for them; autograd's gradient has the decoded shape.
    """

    @property
    def encoded_params(self) -> Collection[str]: ...


def takes_encoded(module: nn.Module, name: str) -> bool:
    """Whether the module wants its parameter `name` as codes and scales."""
    return isinstance(module, TakesEncoded) and name in module.encoded_params


class EncodedTensor(torch.Tensor):
    """A whole tensor or a rank's piece of one, in a block format; to other code a tensor of its decoded values.

    payload: flat uint8, in the order of the elements; codes narrower than a byte are packed as in packing.py.
    scales: one per block, in the order of tiling.py: row by row of blocks, for 2-D blocks.
    tiled_shape: of the tensor that the blocks tile; a piece's own shape is smaller.
    """

    payload: torch.Tensor
    scales: torch.Tensor
    format: BlockFormat
    tiled_shape: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        payload: torch.Tensor,
        scales: torch.Tensor,
        format: BlockFormat,
        *,
        shape: Sequence[int],
        tiled_shape: Sequence[int],
        dtype: torch.dtype,
    ) -> EncodedTensor:
        made = _torch.wrapper(cls, shape, dtype=dtype, device=payload.device)
        made.payload, made.scales, made.format, made.tiled_shape = payload, scales, format, tuple(tiled_shape)
        return made

    def decode(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, as a plain tensor of `dtype` (its own unless given)."""
        values = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        if not self.is_meta:
            decode_into(self.format, self.payload, self.scales, self.tiled_shape, values.view(-1))
        return values

    @torch.no_grad()
    def store(self, values: torch.Tensor) -> None:
        """Encode `values`; the values that it holds already change no bit."""
        if self.is_meta or values.is_meta:
            return
        if isinstance(values, EncodedTensor):
            if values.format is self.format and values.tiled_shape == self.tiled_shape:
                self.payload.copy_(values.payload)
                self.scales.copy_(values.scales)
                return
            values = values.decode()
        values = values.to(self.device)
        # Decoded values encoded anew may differ in a scale's last bit.
        if not torch.equal(self.decode(values.dtype), values):
            encode_into(self.format, values.reshape(-1), self.tiled_shape, self.payload, self.scales)

    def on(self, device: torch.device, dtype: torch.dtype | None = None, *, copy: bool = True) -> EncodedTensor:
        """The same codes elsewhere; without `copy`, memory for them."""
        held = self.payload, self.scales
        planes = [plane.to(device) if copy else torch.empty_like(plane, device=device) for plane in held]
        return self.like(*planes, dtype=dtype)

    def like(self, payload: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype | None = None) -> EncodedTensor:
        """A tensor of the same shape and format around other memory."""
        return EncodedTensor(
            payload,
            scales,
            self.format,
            shape=self.shape,
            tiled_shape=self.tiled_shape,
            dtype=dtype or self.dtype,
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what only its own subclasses pass
        return f"EncodedTensor({tuple(self.shape)}, {self.format.name}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a method, and calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        keep = _KEEPING.get(func)
        if keep is not None and (kept := keep(*args, **kwargs)) is not None:
            return kept
        for written in _torch.written(func, args, kwargs):
            if isinstance(written, EncodedTensor):
                raise VescaleError(
                    f"{func}: a tensor of shape {tuple(written.shape)} is stored in {written.format.name} and not "
                    f"written element by element. Compute new values beside it and store them with copy_."
                )
        return func(*map_tensors(_decoded, list(args)), **map_tensors(_decoded, dict(kwargs)))


def _decoded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.decode() if isinstance(tensor, EncodedTensor) else tensor


def _keep(tensor: EncodedTensor, *_: Any, **__: Any) -> EncodedTensor:
    return tensor.like(tensor.payload, tensor.scales)


def _keep_view(tensor: EncodedTensor, shape: Sequence[int]) -> EncodedTensor | None:
    return _keep(tensor) if tuple(shape) == tuple(tensor.shape) else None


def _keep_moved(tensor: EncodedTensor, *, dtype: torch.dtype | None = None, **options: Any) -> EncodedTensor | None:
    if dtype is not None and not dtype.is_floating_point:
        return None
    return tensor.on(torch.device(options.get("device") or tensor.device), dtype)


def _keep_elsewhere(tensor: EncodedTensor, *, dtype: torch.dtype | None = None, **options: Any) -> EncodedTensor | None:
    """`to_empty` materialises codes as codes; on the same device `empty_like` is somebody's scratch tensor."""
    device = torch.device(options.get("device") or tensor.device)
    return tensor.on(device, dtype, copy=False) if device.type != tensor.device.type else None


def _keep_stored(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor | None:
    if not isinstance(tensor, EncodedTensor):
        return None
    if tuple(source.shape) != tuple(tensor.shape):
        source = source.expand(tensor.shape)
    tensor.store(source)
    return tensor


_KEEPING: dict[Any, Callable[..., torch.Tensor | None]] = {
    aten.detach.default: _keep,
    aten.alias.default: _keep,
    aten.view.default: _keep_view,
    aten._to_copy.default: _keep_moved,
    aten.empty_like.default: _keep_elsewhere,
    aten.copy_.default: _keep_stored,
}
"""What leaves codes as they are; None means that this call does not."""
