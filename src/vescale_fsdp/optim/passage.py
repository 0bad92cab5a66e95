"""One bucket on its way along the mesh axes: one packed all-to-all per axis, the next begun when the last is done.

A `Hop` says, in wire order, which runs go to which peer; runs that stay on this rank are never packed. The first bucket
also carries each rank's vote on which tensors are there at all, so that ranks that disagree raise together instead of
waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_fsdp._torch import foreach_copy_
from vescale_fsdp.errors import VescaleError

from .route import Coordinate, Loan, Message

__all__ = ["Agreement", "Chunks", "Hop", "Passage"]

ChunkKey = tuple[int, Coordinate]
Chunks = dict[ChunkKey, Tensor]

# A vote is the union of what ranks say of a tensor: nothing (they hold none of it), present, absent.
PRESENT, ABSENT = 1, 2


@dataclass(frozen=True)
class Hop:
    """One all-to-all along an axis: the chunks of every message in wire order, and how much each peer gets and gives.

    `num_votes` elements stand before the chunks for every peer but this rank.
    """

    group: dist.ProcessGroup
    here: int
    size: int
    num_votes: int
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
        num_votes: int,
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
        return cls(group, here[axis], size, num_votes, _frozen(sends), _frozen(receives), numel)

    def splits(self, keys: Sequence[Sequence[ChunkKey]]) -> list[int]:
        """Elements to or from each peer."""
        votes = [0 if peer == self.here else self.num_votes for peer in range(self.size)]
        return [sum(map(self.numel.__getitem__, each)) + vote for each, vote in zip(keys, votes, strict=True)]

    def pack(self, chunks: Chunks, votes: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Chunks, and votes, in wire order and dtype."""
        parts = []
        for peer, keys in enumerate(self.sends):
            if votes is not None and self.num_votes and peer != self.here:
                parts.append(votes)
            parts += [chunks[key] for key in keys]
        packed = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=device)
        places = list(torch.split(packed, [part.numel() for part in parts]))
        foreach_copy_(places, parts)
        return packed

    def unpack(self, packed: Tensor) -> tuple[Chunks, list[Tensor]]:
        """The received chunks, as views, and the votes of the other peers."""
        chunks: Chunks = {}
        votes = []
        begin = 0
        for peer, keys in enumerate(self.receives):
            if self.num_votes and peer != self.here:
                votes.append(packed.narrow(0, begin, self.num_votes))
                begin += self.num_votes
            for key in keys:
                chunks[key] = packed.narrow(0, begin, self.numel[key])
                begin += self.numel[key]
        return chunks, votes


class Passage:
    """Chunks under way: `start()` begins the first hop, `finish()` waits for it and makes the others."""

    def __init__(
        self,
        hops: Sequence[Hop],
        chunks: Chunks,
        *,
        dtype: torch.dtype,
        device: torch.device,
        votes: Tensor | None = None,
    ) -> None:
        self.votes = votes
        self._hops = list(hops)
        self._chunks = chunks
        self._dtype = dtype
        self._device = device
        self._wait: Callable[[], Tensor] | None = None

    def start(self) -> Passage:
        if self._hops:
            self._wait = self._begin(self._hops[0])
        return self

    def finish(self) -> Chunks:
        """All chunks that are on this rank at the end of the way."""
        while self._hops:
            assert self._wait is not None
            chunks, votes = self._hops.pop(0).unpack(self._wait())
            self._chunks.update(chunks)
            if self.votes is not None and votes:
                self.votes = _union([self.votes, *votes])
            self._wait = self._begin(self._hops[0]) if self._hops else None
        return self._chunks

    def _begin(self, hop: Hop) -> Callable[[], Tensor]:
        packed = hop.pack(self._chunks, self.votes, self._dtype, self._device)
        received_splits, sent_splits = hop.splits(hop.receives), hop.splits(hop.sends)
        received = packed.new_empty(sum(received_splits))
        work = dist.all_to_all_single(received, packed, received_splits, sent_splits, group=hop.group, async_op=True)

        def wait() -> Tensor:
            assert work is not None
            work.wait()
            _ = packed  # alive until here: the collective reads it
            return received

        return wait


@dataclass(frozen=True)
class Agreement:
    """Do all holders of a tensor have something to lend? `held`: the tensors of which this rank holds anything."""

    names: Sequence[str]
    held: frozenset[int]

    def votes(self, absent: frozenset[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        said = [(ABSENT if i in absent else PRESENT) if i in self.held else 0 for i in range(len(self.names))]
        return torch.tensor(said, dtype=dtype, device=device)

    def settle(self, votes: Tensor, absent: frozenset[int]) -> frozenset[int]:
        """The absent tensors, as all holders agree. Raises VescaleError on every rank when they do not."""
        said = [int(vote) for vote in votes.tolist()]
        for index, vote in enumerate(said):
            if vote == PRESENT | ABSENT:
                here = "none" if index in absent else "one" if index in self.held else "no part of it"
                raise VescaleError(
                    f"{self.names[index]}: some ranks have a gradient for it and others have none (this rank: {here}). "
                    "Set the gradient on all ranks that hold a part, zeros if need be, or to None on all."
                )
        return frozenset(index for index, vote in enumerate(said) if vote == ABSENT) | (absent - self.held)


def _union(votes: Sequence[Tensor]) -> Tensor:
    dtype = votes[0].dtype
    union = torch.zeros_like(votes[0], dtype=torch.uint8)
    for vote in votes:
        union |= vote.to(torch.uint8)
    return union.to(dtype)


def _frozen(lists: Sequence[Sequence[ChunkKey]]) -> tuple[tuple[ChunkKey, ...], ...]:
    return tuple(map(tuple, lists))
