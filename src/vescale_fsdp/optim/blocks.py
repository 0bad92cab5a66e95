"""Optimizer state in a block format: uint8 codes cut as the parameter is, one scale per block, both DTensors.

A parameter of 96 rows of 64 over 2 ranks, in 32x32 blocks, cut after 32 rows:

    parameter   (96, 64) RaggedShard((0,), (1, 2))       rank 0: 32 rows       rank 1: 64 rows
    codes       (96, 64) RaggedShard((0,), (1, 2))       as the parameter
    scales      (6,)     RaggedShard((0,), (1, 2))       rank 0: 2 scales      rank 1: 4 scales

Whether a parameter has such a state depends on its global shape; where it is cut is checked for all ranks on each, so
that all raise or none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from ragged_dtensor import RaggedShard, StridedRaggedShard, Units
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.formats.block_format import BlockFormat, encode
from vescale_fsdp.formats.tiling import Tiling
from vescale_fsdp.layout import Span

__all__ = ["BlockedParam", "Chunk", "Tiles"]

CHUNK_NUMEL = 1 << 17
"""Elements that are decoded at a time: what a step needs beyond its state stays small, and near in cache."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a rank's elements of one parameter, and the run of its blocks that holds them."""

    param: BlockedParam
    elements: Span
    blocks: Span

    def elements_of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.elements.begin, len(self.elements))

    def blocks_of(self, scales: Tensor) -> Tensor:
        return scales.narrow(0, self.blocks.begin, len(self.blocks))


@dataclass(frozen=True, eq=False)
class BlockedParam:
    """One parameter whose state is kept in blocks of one shape.

    param: plain, or a DTensor that one mesh axis at most cuts, with RaggedShard.
    """

    name: str
    param: Tensor
    block: tuple[int, ...]

    def __post_init__(self) -> None:
        if self._sharding is not None:
            self._check_cuts(self._sharding[1])

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling(self.block, tuple(self.param.shape))

    @property
    def numel(self) -> int:
        """Of this rank."""
        return self.param.to_local().numel() if isinstance(self.param, DTensor) else self.param.numel()

    def new_state(self, format: BlockFormat) -> tuple[Tensor, Tensor]:
        """Codes and scales of zeros."""
        local = self.param.to_local() if isinstance(self.param, DTensor) else self.param
        tiling = self.tiling
        codes = torch.empty(local.shape, dtype=torch.uint8, device=local.device)
        scales = torch.empty(tiling.count(local.numel()), dtype=format.scale_dtype, device=local.device)
        for chunk in self.chunks:
            zeros = torch.zeros(len(chunk.elements), device=local.device)
            encoded = encode(format, zeros, tuple(self.param.shape))
            chunk.elements_of(codes.view(-1)).copy_(encoded.payload)
            chunk.blocks_of(scales).copy_(encoded.scales)
        if not isinstance(self.param, DTensor):
            return codes, scales
        whole = tiling.num_blocks
        return self._place(codes, self.param.placements), self._place(scales, self._scale_placements(), (whole,))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """This rank's elements in runs of whole blocks."""
        tiling = self.tiling
        return tuple(
            Chunk(self, Span(begin, end), Span(block, block + tiling.count(end - begin)))
            for begin, end, block in tiling.chunks(self.numel, CHUNK_NUMEL)
        )

    @property
    def _sharding(self) -> tuple[int, RaggedShard] | None:
        """The mesh axis that cuts the parameter, and how; None if every rank has all of it."""
        if not isinstance(self.param, DTensor):
            return None
        cuts = [(axis, each) for axis, each in enumerate(self.param.placements) if not each.is_replicate()]
        if not cuts:
            return None
        if len(cuts) > 1 or not isinstance(cuts[0][1], RaggedShard) or isinstance(cuts[0][1], StridedRaggedShard):
            raise NotImplementedError(
                f"{self.name}: state in blocks is built for one RaggedShard axis, got placements "
                f"{self.param.placements}. Keep this parameter's state in float32 (state_format=None)."
            )
        return cuts[0][0], cuts[0][1]

    def _check_cuts(self, shard: RaggedShard) -> None:
        granularity, numel = self.tiling.granularity, self.param.numel()
        begin = 0
        for value, count in shard.local_units.runs:
            piece = self._unit_numel(shard) * value
            for cut in (begin, begin + piece if count > 1 else begin):
                if cut % granularity and cut < numel:
                    raise VescaleError(
                        f"{self.name}: cut after {cut} elements, but blocks {self.block} may be cut every "
                        f"{granularity}. Ask for whole blocks: fully_shard(..., param_policy=AdamW8bit.policy)."
                    )
            begin += piece * count

    def _unit_numel(self, shard: RaggedShard) -> int:
        return self.param.numel() // shard.local_units.total if self.param.numel() else 0

    def _scale_placements(self) -> tuple[Placement, ...]:
        assert isinstance(self.param, DTensor)
        placements: list[Placement] = [Replicate()] * self.param.device_mesh.ndim
        if self._sharding is not None:
            axis, shard = self._sharding
            unit, tiling = self._unit_numel(shard), self.tiling
            runs = tuple((tiling.count(value * unit), count) for value, count in shard.local_units.runs)
            placements[axis] = RaggedShard((0,), Units.from_runs(runs))
        return tuple(placements)

    def _place(self, local: Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...] | None = None) -> Tensor:
        assert isinstance(self.param, DTensor)
        size = torch.Size(shape) if shape is not None else self.param.shape
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, self.param.device_mesh, placements, run_check=False, shape=size, stride=stride)


@dataclass(frozen=True)
class Tiles:
    """Chunks of several parameters as one tensor of whole blocks, (blocks, elements of a block): one update for all."""

    chunks: tuple[Chunk, ...]

    @classmethod
    def batches(cls, params: Sequence[BlockedParam]) -> Iterator[Tiles]:
        """All chunks of all parameters, about CHUNK_NUMEL elements at a time."""
        batch: list[Chunk] = []
        numel = 0
        for chunk in (chunk for param in params for chunk in param.chunks):
            if batch and numel + len(chunk.elements) > CHUNK_NUMEL:
                yield cls(tuple(batch))
                batch, numel = [], 0
            batch.append(chunk)
            numel += len(chunk.elements)
        if batch:
            yield cls(tuple(batch))

    def load(self, flats: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Each chunk's elements, of the flat tensor beside it, as blocks; edge blocks are filled up with zeros."""
        block_numel = self.chunks[0].param.tiling.block_numel
        blocks = torch.empty(self._ends[-1], block_numel, dtype=dtype, device=flats[0].device)
        for chunk, flat, rows in zip(self.chunks, flats, self._rows(blocks), strict=True):
            chunk.param.tiling.split_into(chunk.elements_of(flat), rows)
        return blocks

    def store(self, blocks: Tensor, flats: Sequence[Tensor]) -> None:
        """Write the blocks' elements back."""
        for chunk, flat, rows in zip(self.chunks, flats, self._rows(blocks), strict=True):
            chunk.param.tiling.join_into(rows, chunk.elements_of(flat))

    def clear_padding(self, blocks: Tensor) -> None:
        """Zero what fills up edge blocks: a code of zero bits need not decode to zero."""
        for chunk, rows in zip(self.chunks, self._rows(blocks), strict=True):
            tiling, numel = chunk.param.tiling, len(chunk.elements)
            if numel < rows.numel():
                rows.copy_(tiling.split(tiling.join(rows, numel)))

    def load_scales(self, scales: Sequence[Tensor]) -> Tensor:
        return torch.cat([chunk.blocks_of(each) for chunk, each in zip(self.chunks, scales, strict=True)])

    def store_scales(self, values: Tensor, scales: Sequence[Tensor]) -> None:
        for chunk, each, mine in zip(self.chunks, scales, self._rows(values), strict=True):
            chunk.blocks_of(each).copy_(mine)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(chunk.blocks) for chunk in self.chunks))

    def _rows(self, blocks: Tensor) -> Iterator[Tensor]:
        for chunk, end in zip(self.chunks, self._ends, strict=True):
            yield blocks.narrow(0, end - len(chunk.blocks), len(chunk.blocks))
