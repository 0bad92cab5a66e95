"""save: write a checkpoint aside, then publish it, so that at any moment a complete one can be loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.tensor import DTensor

from .contents import aliases_of, state_of
from .errors import CheckpointError, on_rank_0, together
from .files import CheckedWriter
from .manifest import Manifest, next_data, publish
from .save_planner import BoxSavePlanner, collection_paused

__all__ = ["save"]


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save the model, and its optimizer, to `folder`; every rank calls it, and the folder is one that all see.

    A save that is interrupted at any point leaves the previous checkpoint in `folder` as it was; one that returns has
    replaced it on disk. Until then both take space. What is written is what torch.distributed.checkpoint writes, so any
    world size, plan or engine reads it. Data is written without collectives. Tied parameters are written once.

    extra: JSON values, such as the number of steps; `load` returns them. Rank 0's count.

    Raises CheckpointError on all ranks if any could not write.
    """
    path = Path(folder)
    values = dict(extra or {})
    state: dict[str, Any] = {}
    names = together(lambda: _fill(state, model, optimizer))
    data = on_rank_0(lambda: _prepare(path, values))
    writer = CheckedWriter(path / data)
    planner = BoxSavePlanner(same_names=len(set(names)) == 1)
    try:
        with collection_paused():
            write(state, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        on_rank_0(lambda: shutil.rmtree(path / data, ignore_errors=True))
        raise CheckpointError(f"{path}: not saved, what was there is as it was. {error}") from error
    facts = {name: each for part in together(lambda: writer.facts) for name, each in part.items()}
    on_rank_0(lambda: publish(path, Manifest(data, facts, aliases_of(model), values)))


def _fill(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """The digest of the names, and of what is a tensor and what a DTensor, in their order."""
    state.update(state_of(model, optimizer))
    return sha256("\n".join(_names(state)).encode()).hexdigest()


def _names(state: Any, path: str = "") -> Iterator[str]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _names(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _names(value, f"{path}/{index}")
    else:
        yield f"{path} {isinstance(state, torch.Tensor)} {isinstance(state, DTensor)}"


def _prepare(folder: Path, extra: Mapping[str, Any]) -> str:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra: expected values that JSON can hold: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    data = next_data(folder)
    (folder / data).mkdir()
    return data
