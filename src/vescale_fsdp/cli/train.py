"""`vescale-fsdp train`: train a small GPT on real text, fully sharded over ranks that it starts itself."""

from __future__ import annotations

__all__ = ["train"]


def train() -> None:
    """Train a byte-level GPT on the Python standard library's source files."""
    raise NotImplementedError("train")
