"""The file that says which data is the checkpoint: written last, by one atomic rename.

    folder/checkpoint.json        {"version": 1, "data": "data-7", "files": {"__0_0.distcp": [nbytes, crc32], ...},
                                   "aliases": {"head.weight": "embed.weight"}, "extra": {"step": 1000}}
    folder/data-7/                what torch.distributed.checkpoint wrote, .metadata among it
    folder/data-8/                a save that was interrupted: nothing names it, and the next save removes it

Until the rename, `checkpoint.json` names the previous data, which nobody has touched; from then on the new one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError

__all__ = ["MANIFEST", "VERSION", "FileFacts", "Manifest", "next_data", "publish"]

MANIFEST = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True)
class FileFacts:
    """Of a written file: its size, and the CRC-32 of its bytes."""

    nbytes: int
    crc32: int

    def __post_init__(self) -> None:
        for name in ("nbytes", "crc32"):
            if type(getattr(self, name)) is not int:
                raise CheckpointError(f"{name}: expected a whole number, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Manifest:
    """Which folder holds the data, what its files must be, and what is not in them.

    `aliases`: names of tied tensors, and the name under which the data has them. `extra`: the caller's JSON values.
    """

    data: str
    files: Mapping[str, FileFacts]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.data, *self.files):
            if not name or "/" in name or name.startswith(".."):
                raise CheckpointError(f"{MANIFEST}: expected the name of a file or folder beside it, got {name!r}")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """What `folder` holds; CheckpointError if there is nothing, or nothing that this version understands."""
        path = folder / MANIFEST
        if not path.is_file():
            hint = (
                " (torch.distributed.checkpoint wrote it: load it with that)" if (folder / ".metadata").exists() else ""
            )
            raise CheckpointError(f"{folder}: holds no checkpoint, there is no {MANIFEST}{hint}")
        try:
            value = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path}: not JSON: {error}") from None
        return cls._of(path, value)

    @classmethod
    def _of(cls, path: Path, value: object) -> Manifest:
        match value:
            case {"version": int(version)} if version > VERSION:
                raise CheckpointError(
                    f"{path}: format version {version}, but this vescale-fsdp reads up to {VERSION}. Upgrade it."
                )
            case {
                "version": int(),
                "data": str(data),
                "files": dict(files),
                "aliases": dict(aliases),
                "extra": dict(extra),
            }:
                try:
                    facts = {name: FileFacts(nbytes, crc32) for name, (nbytes, crc32) in files.items()}
                    return cls(data, facts, aliases, extra)
                except (TypeError, ValueError) as error:
                    raise CheckpointError(f"{path}: files: {error}") from None
        raise CheckpointError(f"{path}: expected version, data, files, aliases and extra, got {str(value)[:80]}")

    def to_json(self) -> str:
        files = {name: (facts.nbytes, facts.crc32) for name, facts in sorted(self.files.items())}
        value = {"data": self.data, "files": files, "aliases": dict(self.aliases), "extra": dict(self.extra)}
        return json.dumps({"version": VERSION, **value}, indent=1)


def next_data(folder: Path) -> str:
    """The name of a folder that no save has used yet."""
    numbers = [int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"data-(\d+)", path.name))]
    return f"data-{max(numbers, default=0) + 1}"


def publish(folder: Path, manifest: Manifest) -> None:
    """Make `manifest` the checkpoint, then remove all other data."""
    sync(folder / manifest.data)
    aside = folder / f"{MANIFEST}.new"
    with aside.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / MANIFEST)
    sync(folder)
    for path in folder.iterdir():
        if re.fullmatch(r"data-\d+", path.name) and path.name != manifest.data:
            shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Let names inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
