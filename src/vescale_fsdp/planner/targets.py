"""At which shares of a class a search over all orders is worth its steps, one after the other."""

from __future__ import annotations

from .classes import ShareClass

__all__ = ["Targets"]

MAX_MISSES = 3
"""Searches that were cut short in a row and found nothing: a fourth, at a larger share, hardly ever finds more."""


class Targets:
    """The bound first, as it is often met; then the distance to the best share is halved.

    Where searches are complete, one that finds nothing halfway is followed by one just below the best share: that
    share is often the optimum, and this proves it at once. `proved`: below it, no order fits.
    """

    def __init__(self, share_class: ShareClass, *, are_complete: bool) -> None:
        self.share_class = share_class
        self.proved = self.low = share_class.bound
        self.are_complete = are_complete
        self.misses = 0
        self.tries = 0
        self.doubts_more = False

    def next(self, best: int) -> int | None:
        """The next share to try, less than the best known; None if there is none."""
        if self.low >= best or self.misses == MAX_MISSES:
            return None
        step = self.share_class.divisor
        self.tries += 1
        if self.tries == 1:
            return self.low
        if self.doubts_more:
            self.doubts_more = False
            return (best - 1) // step * step
        return self.low + (best - self.low) // step // 2 * step

    def hit(self) -> None:
        self.misses = 0

    def missed(self, target: int, *, complete: bool) -> None:
        """No order was found; there is none if the search was complete, and by monotony none below either."""
        self.low = target + self.share_class.divisor
        if complete:
            self.proved = self.low
            self.doubts_more = self.are_complete and self.tries > 1
        else:
            self.misses += 1
