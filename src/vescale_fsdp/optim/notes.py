"""What ranks tell each other beside the matrices: which tensors are there at all, and whether a rank has failed.

Notes ride before the chunks of every hop, so that they cost no collective: one element that is set once a rank has
failed, and on the way out of the first bucket one vote for each tensor. What a rank hears it passes on with its next
hop; ranks that disagree, or of which one fails, raise together instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from vescale_fsdp.errors import VescaleError

__all__ = ["Agreement", "Turn", "union"]

T = TypeVar("T")

# A vote is the union of what ranks say of a tensor: nothing (they hold none of it), present, absent.
PRESENT, ABSENT = 1, 2


@dataclass(frozen=True)
class Agreement:
    """Do all holders of a tensor have something to lend? `held`: the tensors of which this rank holds anything."""

    names: Sequence[str]
    held: frozenset[int]

    def votes(self, absent: frozenset[int]) -> list[int]:
        return [(ABSENT if i in absent else PRESENT) if i in self.held else 0 for i in range(len(self.names))]

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


@dataclass
class Turn:
    """One call of a lender: what is absent, what went wrong on this rank, and what was heard of others."""

    absent: frozenset[int]
    failure: Exception | None = None
    _heard: Tensor | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank has failed, or knows that another has.

        Only on CPU is it known at once: elsewhere a look at a note would wait for all the work before it.
        """
        heard = self._heard is not None and self._heard.device.type == "cpu" and bool(self._heard)
        return self.failure is not None or heard

    def attempt(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """What `act` gives, or `otherwise` where something has failed: a rank that fails goes on sending."""
        if not self.has_failed:
            try:
                return act()
            except Exception as error:
                self.failure = error
        return otherwise()

    def notes(self, votes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        notes = torch.tensor([int(self.failure is not None), *votes], dtype=dtype, device=device)
        if self._heard is not None:
            notes[:1] = torch.maximum(notes[:1], self._heard)
        return notes

    def hear(self, notes: Tensor | None) -> None:
        if notes is not None:
            self._heard = notes[:1] if self._heard is None else torch.maximum(self._heard, notes[:1])

    def conclude(self) -> None:
        """Raise this rank's own error, or VescaleError if it has heard of another's."""
        if self.failure is not None:
            raise self.failure
        if self._heard is not None and bool(self._heard):
            raise VescaleError(
                "Another rank failed while matrices were lent, and says why. What it owned is not written; matrices of "
                "earlier buckets may be. Take parameters and optimizer from a checkpoint before going on."
            )


def union(notes: Sequence[Tensor]) -> Tensor:
    """What any of the ranks says, bit by bit."""
    found = torch.zeros_like(notes[0], dtype=torch.uint8)
    for note in notes:
        found |= note.to(torch.uint8)
    return found.to(notes[0].dtype)
