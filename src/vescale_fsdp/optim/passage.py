"""One bucket on its way along the mesh axes: one packed all-to-all per axis, the next begun when the last is done.

A `Hop` says, in wire order, which runs go to which peer; runs that stay on this rank are never packed. The notes that
ranks send each other stand before the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_fsdp._torch import foreach_copy_

from .notes import union
from .route import Coordinate, Loan, Message

__all__ = ["Chunks", "Hop", "Passage"]

ChunkKey = tuple[int, Coordinate]
Chunks = dict[ChunkKey, Tensor]


@dataclass(frozen=True)
class Hop:
    """One all-to-all along an axis: the chunks of every message in wire order, and how much each peer gets and gives.

    `num_notes` elements stand before the chunks for every peer but this rank.
    """

    group: dist.ProcessGroup
    here: int
    size: int
    num_notes: int
    sends: tuple[tuple[ChunkKey, ...], ...]
    receives: tuple[tuple[ChunkKey, ...], ...]
    numel: Mapping[ChunkKey, int]

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        loans: Sequence[Loan],
        here: Coordinate,
        axis: int,
        size: int,
        group: dist.ProcessGroup,
        num_notes: int,
    ) -> Hop:
        """The hop along `axis` of the messages of the rank at `here`."""
        sends: list[list[ChunkKey]] = [[] for _ in range(size)]
        receives: list[list[ChunkKey]] = [[] for _ in range(size)]
        numel: dict[ChunkKey, int] = {}
        for message in messages:
            is_sent = message.source == here
            peer = (message.target if is_sent else message.source)[axis]
            for key in message.keys:
                (sends if is_sent else receives)[peer].append((message.loan, key))
                numel[message.loan, key] = loans[message.loan].holdings[key].numel
        return cls(group, here[axis], size, num_notes, _frozen(sends), _frozen(receives), numel)

    def splits(self, keys: Sequence[Sequence[ChunkKey]]) -> list[int]:
        """Elements to or from each peer."""
        notes = [0 if peer == self.here else self.num_notes for peer in range(self.size)]
        return [sum(map(self.numel.__getitem__, each)) + note for each, note in zip(keys, notes, strict=True)]

    def pack(self, chunks: Chunks, notes: Tensor) -> Tensor:
        """Notes and chunks in wire order, in the notes' dtype."""
        parts = []
        for peer, keys in enumerate(self.sends):
            if peer != self.here:
                parts.append(notes)
            parts += [chunks[key] for key in keys]
        packed = notes.new_empty(sum(part.numel() for part in parts))
        places = list(torch.split(packed, [part.numel() for part in parts]))
        foreach_copy_(places, parts)
        return packed

    def unpack(self, packed: Tensor) -> tuple[Chunks, list[Tensor]]:
        """The received chunks, as views, and the notes of the other peers."""
        chunks: Chunks = {}
        notes = []
        begin = 0
        for peer, keys in enumerate(self.receives):
            if peer != self.here:
                notes.append(packed.narrow(0, begin, self.num_notes))
                begin += self.num_notes
            for key in keys:
                chunks[key] = packed.narrow(0, begin, self.numel[key])
                begin += self.numel[key]
        return chunks, notes


class Passage:
    """Chunks under way: `start()` begins the first hop, `finish()` waits for it and makes the others."""

    def __init__(self, hops: Sequence[Hop], chunks: Chunks, notes: Tensor) -> None:
        self._hops = list(hops)
        self._chunks = chunks
        self._notes = notes
        self._has_heard = False
        self._wait: Callable[[], Tensor] | None = None

    @property
    def notes(self) -> Tensor | None:
        """What any rank on the way says; None before `finish`, or where nobody was met."""
        return self._notes if self._has_heard else None

    def start(self) -> Passage:
        if self._hops:
            self._wait = self._begin(self._hops[0])
        return self

    def finish(self) -> Chunks:
        """All chunks that are on this rank at the end of the way."""
        while self._hops:
            assert self._wait is not None
            chunks, notes = self._hops.pop(0).unpack(self._wait())
            self._chunks.update(chunks)
            self._notes = union([self._notes, *notes])
            self._has_heard = True
            self._wait = self._begin(self._hops[0]) if self._hops else None
        return self._chunks

    def _begin(self, hop: Hop) -> Callable[[], Tensor]:
        packed = hop.pack(self._chunks, self._notes)
        received_splits, sent_splits = hop.splits(hop.receives), hop.splits(hop.sends)
        received = packed.new_empty(sum(received_splits))
        work = dist.all_to_all_single(received, packed, received_splits, sent_splits, group=hop.group, async_op=True)

        def wait() -> Tensor:
            assert work is not None
            work.wait()
            _ = packed  # alive until here: the collective reads it
            return received

        return wait


def _frozen(lists: Sequence[Sequence[ChunkKey]]) -> tuple[tuple[ChunkKey, ...], ...]:
    return tuple(map(tuple, lists))
