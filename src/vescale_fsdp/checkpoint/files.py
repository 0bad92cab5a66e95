"""Files that know their checksum: taken while they are written, compared when they are read."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from .errors import CheckpointError
from .manifest import FileFacts, Manifest

__all__ = ["CheckedWriter", "check_bytes", "check_sizes"]

CHUNK_NBYTES = 1 << 22


class CheckedWriter(FileSystemWriter):
    """torch's writer of one file per rank; `facts` are those of the files that this rank wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.facts: dict[str, FileFacts] = {}
        self.fs = _CheckedFiles(self.facts)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, and empty it: torch sends what is left to all ranks, who do not need it."""
        super().finish(metadata, results)
        metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data = {}, None, None


class _CheckedFiles(FileSystem):
    def __init__(self, facts: dict[str, FileFacts]) -> None:
        self._facts = facts

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _CheckedFile(path) as stream:
            yield stream
        self._facts[Path(path).name] = FileFacts(stream.nbytes, stream.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._facts[Path(new_path).name] = self._facts.pop(Path(path).name)


class _CheckedFile(io.BufferedWriter):
    """A file that is only ever appended to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"), CHUNK_NBYTES)
        self.nbytes = 0
        self.crc32 = 0

    def write(self, data: Any, /) -> int:  # Any: a buffer, for which Python 3.11 has no name
        self.crc32 = zlib.crc32(data, self.crc32)
        written = super().write(data)
        self.nbytes += written
        return written


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file is there and as long as it was written."""
    for name, facts in manifest.files.items():
        path = folder / manifest.data / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {folder} is not complete")
        if (size := path.stat().st_size) != facts.nbytes:
            what = "truncated" if size < facts.nbytes else "changed"
            raise CheckpointError(f"{path}: {what}: expected {facts.nbytes} bytes, found {size}")


def check_bytes(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Read every file and compare its checksum."""
    for name, facts in files.items():
        crc32 = 0
        with (folder / name).open("rb") as file:
            while chunk := file.read(CHUNK_NBYTES):
                crc32 = zlib.crc32(chunk, crc32)
        if crc32 != facts.crc32:
            raise CheckpointError(
                f"{folder / name}: corrupted: expected CRC-32 {facts.crc32:08x}, found {crc32:08x}. Load an older one."
            )
