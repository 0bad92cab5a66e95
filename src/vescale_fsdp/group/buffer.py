"""The bytes of one group in one role: a single storage whose slices are the group's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ..layout import Layout, Span

__all__ = ["DBuffer"]


class DBuffer:
    """One storage that holds every lane of a group, lane after lane; each tensor is a contiguous slice of it.

    Two roles share this class. A rank's shard has `share` elements per lane, the whole has `num_ranks * share`:

        num_ranks=2, share=8, a: 10 elements, b: 4
          whole     |aaaaaaaa|aa..bbbb|     pieces: a = [0, 10), b = [12, 16)
          shard 0   |aaaaaaaa|              pieces: a = [0, 8),  b = [8, 8)
          shard 1   |aa..bbbb|              pieces: a = [0, 2),  b = [4, 8)

    `pieces[i]` says where tensor i lies in `flat`; what no piece covers is padding. Views survive `free` and
    `alloc`, but are made while the buffer is allocated, as it is when new.
    """

    def __init__(
        self, lane_numels: Sequence[int], pieces: Sequence[Span], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pieces = tuple(pieces)
        self._lane_numels = tuple(lane_numels)
        with torch.inference_mode(False):  # a buffer made while serving must still train
            self.replace(torch.empty(sum(lane_numels), dtype=dtype, device=device))

    def replace(self, flat: torch.Tensor) -> None:
        """Use the memory of `flat` from now on."""
        self.flat = flat
        starts = accumulate(self._lane_numels, initial=0)
        self.lanes = tuple(
            flat.narrow(0, start, numel) for start, numel in zip(starts, self._lane_numels, strict=False)
        )
        self.nbytes = flat.numel() * flat.itemsize
        self._gaps: tuple[torch.Tensor, ...] | None = None

    @classmethod
    def shard(
        cls, layout: Layout, numels: Sequence[int], rank: int, *, dtype: torch.dtype, device: torch.device
    ) -> DBuffer:
        """What `rank` keeps: its share of every lane."""
        lane_numels = [lane.share for lane in layout.lanes]
        bases = list(accumulate(lane_numels, initial=0))
        pieces = []
        for i, numel in enumerate(numels):
            begin = bases[layout.lane_of[i]] + layout.local_offset(i, rank)
            pieces.append(Span(begin, begin + len(layout.shard_range(i, numel, rank))))
        return cls(lane_numels, pieces, dtype=dtype, device=device)

    @classmethod
    def whole(cls, layout: Layout, numels: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> DBuffer:
        """All shares of every lane."""
        lane_numels = [layout.num_ranks * lane.share for lane in layout.lanes]
        bases = list(accumulate(lane_numels, initial=0))
        begins = [bases[lane] + start for lane, start in zip(layout.lane_of, layout.starts, strict=True)]
        pieces = [Span(begin, begin + numel) for begin, numel in zip(begins, numels, strict=True)]
        return cls(lane_numels, pieces, dtype=dtype, device=device)

    def view(self, index: int) -> torch.Tensor:
        """Tensor `index`, flat."""
        piece = self.pieces[index]
        return self.flat.narrow(0, piece.begin, len(piece))

    def sections(self) -> tuple[list[int], list[int]]:
        """Sizes that split `flat` in one call, padding included, and where among the parts each tensor is."""
        sizes, end = [], 0
        places = [0] * len(self.pieces)
        for i in sorted(range(len(places)), key=lambda i: (self.pieces[i].begin, self.pieces[i].end)):
            piece = self.pieces[i]
            begin = end if len(piece) == 0 else piece.begin  # an empty piece may be anywhere
            sizes += [begin - end, len(piece)]
            places[i] = len(sizes) - 1
            end = begin + len(piece)
        return [*sizes, self.flat.numel() - end], places

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def is_allocated(self) -> bool:
        return self.flat.untyped_storage().size() == self.nbytes

    def alloc(self) -> None:
        # Resize, do not reassign: autograd still holds views of this storage.
        storage = self.flat.untyped_storage()
        if storage.size() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def zero_gaps(self) -> None:
        """Zero the padding, so that sums over the buffer see nothing but tensors."""
        if self._gaps is None:
            self._gaps = tuple(self.flat.narrow(0, gap.begin, len(gap)) for gap in self.gaps())
        for gap in self._gaps:
            gap.zero_()

    def gaps(self) -> list[Span]:
        """The runs of `flat` that belong to no tensor."""
        gaps, end = [], 0
        for piece in sorted(self.pieces, key=lambda piece: piece.begin):
            if piece.begin > end:
                gaps.append(Span(end, piece.begin))
            end = max(end, piece.end)
        if end < self.flat.numel():
            gaps.append(Span(end, self.flat.numel()))
        return gaps
