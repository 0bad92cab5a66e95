"""What can go wrong with a ragged tensor: every error says what was expected, what came and what to do next."""

from __future__ import annotations


class RaggedShardError(ValueError):
    """Any misuse of a ragged placement. All other errors of this package derive from it."""


class LayoutError(RaggedShardError):
    """Units, dims, shape and mesh do not fit together."""


class UnsupportedOpError(RaggedShardError, NotImplementedError):
    """An op has no rule for ragged operands.

    A `NotImplementedError` too: torch rewraps every other error of an op rule as a bare RuntimeError, and takes this
    one as the request to decompose a composite op first.
    """


class UnsupportedTransitionError(RaggedShardError, NotImplementedError):
    """There is no way from one tuple of placements to another."""


class UnsupportedTorchError(RaggedShardError, RuntimeError):
    """The installed torch is not one that this package knows how to extend."""
