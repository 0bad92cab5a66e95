"""load: look at everything that could be wrong with a checkpoint, and only then change the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_into

from .contents import check_fit, drop_unsaved_slots, fresh_slots, state_of, with_aliases
from .errors import CheckpointError, on_rank_0, together
from .files import check_bytes, check_sizes
from .manifest import Manifest

__all__ = ["check", "load"]


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    verify: bool = False,
) -> dict[str, Any]:
    """Load what `save` wrote, at any world size and plan; every rank calls it. Returns `extra`.

    The optimizer may be fresh. Values go straight into the shards: nothing is gathered.

    verify: read every file first and compare checksums, so that silent corruption is found.

    Raises CheckpointError, on all ranks alike, before anything changes: no checkpoint, a newer format, missing or
    truncated files, wrong checksums, names that are missing or too many, other shapes.
    """
    path = Path(folder)
    manifest = on_rank_0(lambda: check(path))
    if verify:
        together(lambda: check_bytes(path / manifest.data, _my_share(manifest)))
    reader = FileSystemReader(path / manifest.data)
    with fresh_slots(optimizer):
        state: dict[str, Any] = {}
        together(lambda: state.update(state_of(model, optimizer)))
        together(lambda: _fit(state, reader, manifest))
        try:
            read_into(state, storage_reader=reader)
        except CheckpointException as error:
            raise CheckpointError(f"{path}: cannot be read; parameters may have changed. {error}") from error
        set_model_state_dict(model, with_aliases(model, state["model"]))
        if optimizer is not None:
            options = StateDictOptions(strict=False)  # parameters without slots are not missing
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return dict(manifest.extra)


def check(folder: str | os.PathLike[str]) -> Manifest:
    """What `folder` says it holds, on this rank alone; CheckpointError if files are missing or not of their sizes."""
    manifest = Manifest.read(Path(folder))
    check_sizes(Path(folder), manifest)
    return manifest


def _fit(state: dict[str, Any], reader: FileSystemReader, manifest: Manifest) -> None:
    metadata = reader.read_metadata()
    drop_unsaved_slots(state, metadata)
    check_fit(state, metadata, manifest.aliases)


def _my_share(manifest: Manifest) -> dict[str, Any]:
    """The files that this rank verifies."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return dict(sorted(manifest.files.items())[rank::num_ranks])
