"""What a block format is, and how a piece of a tensor is encoded and decoded with one.

A format says how one block becomes codes and a scale; the rest is done here, the same for every format: which elements
make a block (tiling.py), how codes become bytes (packing.py), and therefore what may not be cut.

    piece (n elements) --split--> blocks (B, N) --encode--> codes (B, N), scales (B,) --join, pack--> payload (bytes)

A piece is what a rank owns of a tensor. Since it holds whole blocks, encoding each rank's piece gives, bit by bit, the
pieces of the encoded tensor: no rank needs to know another's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ragged_dtensor.granularity import ELEMENT, Granularity

from ..errors import PluginError, VescaleError
from .packing import codes_per_pack, pack, packed_numel, unpack
from .tiling import Tiling

__all__ = [
    "BlockFormat",
    "Encoded",
    "check_format",
    "decode",
    "decode_blocks",
    "decode_into",
    "encode",
    "encode_blocks",
    "encode_into",
    "granularity_of",
    "payload_nbytes",
]

MAX_SCALE_NBYTES = 8

CHUNK_NUMEL = 1 << 18
"""Elements that are encoded or decoded at a time: float32 copies of them stay small, and near in cache."""


@runtime_checkable
class BlockFormat(Protocol):
    """One way to store blocks of a tensor with fewer bits. Encode and decode are pure functions over whole blocks.

    block_shape: (rows, columns) over the last two dims, or (length,) over the flattened tensor.
    bits: of one code: 8, 6 or 4.
    scale_dtype: of the one scale per block.
    """

    @property
    def name(self) -> str: ...
    @property
    def block_shape(self) -> tuple[int, ...]: ...
    @property
    def bits(self) -> int: ...
    @property
    def scale_dtype(self) -> torch.dtype: ...

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 (B, N) -> uint8 codes (B, N) below 2**bits, scales (B,); B may be 0, short blocks end in zeros.

        A block that holds inf or nan must decode to nan or inf, never to finite values.
        """
        ...

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """uint8 (B, N), scales (B,) -> float32 (B, N)."""
        ...


@dataclass(frozen=True, eq=False)
class Encoded:
    """A piece in a block format: its codes as flat uint8, in the order of the elements, and one scale per block."""

    payload: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes + self.scales.nbytes


def check_format(format: BlockFormat) -> None:
    """Raise VescaleError unless what the format says of itself can be planned with."""
    Tiling(format.block_shape, ())
    codes_per_pack(format.bits)
    if not isinstance(format.scale_dtype, torch.dtype) or format.scale_dtype.itemsize > MAX_SCALE_NBYTES:
        raise VescaleError(
            f"{format.name}: scale_dtype is a torch.dtype of at most {MAX_SCALE_NBYTES} bytes, got "
            f"{format.scale_dtype!r}"
        )


def encode_blocks(format: BlockFormat, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The format's own `encode`, checked: float32 (B, N) -> codes (B, N), scales (B,)."""
    made = format.encode(blocks)
    if not isinstance(made, tuple) or len(made) != 2:
        raise PluginError(f"{format.name}: encode gives (codes, scales), got {type(made).__name__}")
    _check(format, "codes of encode", made[0], blocks.shape, torch.uint8, blocks.device)
    _check(format, "scales of encode", made[1], blocks.shape[:1], format.scale_dtype, blocks.device)
    return made


def decode_blocks(format: BlockFormat, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The format's own `decode`, checked in the same way; codes (B, N), scales (B,) -> float32 (B, N)."""
    values = format.decode(codes, scales)
    _check(format, "result of decode", values, codes.shape, torch.float32, codes.device)
    return values


def _check(
    format: BlockFormat, what: str, found: object, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(found, torch.Tensor):
        raise PluginError(f"{format.name}: the {what} is a {type(found).__name__}, not a tensor")
    if (found.shape, found.dtype, found.device) != (shape, dtype, device):
        raise PluginError(
            f"{format.name}: expected the {what} as {dtype} {tuple(shape)} on {device}, got {found.dtype} "
            f"{tuple(found.shape)} on {found.device}. vescale_fsdp.testing.BlockFormatContract finds such mistakes."
        )


def granularity_of(format: BlockFormat, shape: tuple[int, ...]) -> Granularity:
    """What may not be cut of a tensor of `shape`: whole blocks, and whole bytes of payload."""
    numel = math.lcm(Tiling(format.block_shape, shape).granularity, codes_per_pack(format.bits))
    if numel == 1:
        return ELEMENT
    size = "x".join(map(str, format.block_shape))
    return Granularity(numel, (f"{size} blocks ({format.name})",))


def payload_nbytes(format: BlockFormat, numel: int) -> int:
    """Bytes of payload of a piece of `numel` elements."""
    return packed_numel(numel, format.bits)


def encode(format: BlockFormat, piece: torch.Tensor, shape: tuple[int, ...]) -> Encoded:
    """Encode a flat, floating-point piece of a tensor of `shape`. Works on the piece alone: no communication."""
    tiling = Tiling(format.block_shape, shape)
    codes, scales = encode_blocks(format, tiling.split(piece.detach().float()))
    return Encoded(pack(tiling.join(codes, piece.numel()), format.bits), scales)


def decode(
    format: BlockFormat, encoded: Encoded, shape: tuple[int, ...], numel: int, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The flat piece of `numel` elements that `encoded` stands for: float32 products, rounded once to `dtype`."""
    tiling = Tiling(format.block_shape, shape)
    codes = tiling.split(unpack(encoded.payload, format.bits, numel))
    return tiling.join(decode_blocks(format, codes, encoded.scales), numel).to(dtype)


def encode_into(
    format: BlockFormat, piece: torch.Tensor, shape: tuple[int, ...], payload: torch.Tensor, scales: torch.Tensor
) -> None:
    """Encode a piece, a chunk at a time, into memory that lies ready: flat uint8 payload, and the piece's scales."""
    tiling = Tiling(format.block_shape, shape)
    for begin, end, block in tiling.chunks(piece.numel(), CHUNK_NUMEL, multiple=codes_per_pack(format.bits)):
        encoded = encode(format, piece[begin:end], shape)
        payload[begin * format.bits // 8 :][: encoded.payload.numel()] = encoded.payload
        scales[block : block + encoded.scales.numel()] = encoded.scales


def decode_into(
    format: BlockFormat, payload: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], piece: torch.Tensor
) -> None:
    """Decode a piece, a chunk at a time, into the flat tensor `piece`, of any floating-point dtype."""
    tiling = Tiling(format.block_shape, shape)
    for begin, end, block in tiling.chunks(piece.numel(), CHUNK_NUMEL, multiple=codes_per_pack(format.bits)):
        first = begin * format.bits // 8
        bytes_of_chunk = payload[first : first + payload_nbytes(format, end - begin)]
        encoded = Encoded(bytes_of_chunk, scales[block : block + tiling.count(end - begin)])
        piece[begin:end] = decode(format, encoded, shape, end - begin)
