"""The text: the Python standard library's own source, or any file or folder, with some files held out of training.

Both splits and all batches are functions of the files and the seed alone, never of the number of ranks.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "find_files"]

# Not in every installation, or not written by people.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo", "lib2to3"}
SKIPPED_FILES = {"pydoc_data/topics.py"}
HELD_OUT_SHARE = 10  # one file in so many is held out
MAX_NBYTES = 1 << 30


def find_files(data: Path | None) -> tuple[Path, ...]:
    """Every file to read, sorted by its path inside `data`; ValueError says what is wrong with `data`."""
    if data is None:
        return _standard_library()
    if not data.exists():
        raise ValueError(f"--data {data}: no such file or folder")
    if data.is_file():
        files = [data]
    else:
        files = sorted(path for path in data.rglob("*") if path.is_file() and not _hidden(path.relative_to(data)))
    nbytes = sum(path.stat().st_size for path in files)
    if not nbytes:
        raise ValueError(f"--data {data}: {len(files)} files, and not one byte in them")
    if nbytes > MAX_NBYTES:
        raise ValueError(
            f"--data {data}: {nbytes:,} bytes, but every rank reads all of it; give at most {MAX_NBYTES:,}"
        )
    for path in files:
        path.open("rb").close()
    return tuple(files)


def _standard_library() -> tuple[Path, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    files = sorted(path for path in files if path.relative_to(root).as_posix() not in SKIPPED_FILES)
    if not files:
        raise ValueError(f"{root} holds no .py files (a zipped standard library?). Give --data a file or folder")
    return tuple(files)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes never seen in training."""

    train: bytes
    held_out: bytes
    num_files: int
    num_held_out: int

    @classmethod
    def read(cls, files: tuple[Path, ...], seq: int) -> Corpus:
        """One file in ten (at least one, chosen by its name) is held out; a lone file gives its last tenth."""
        texts = [path.read_bytes() for path in files]
        if len(files) == 1:
            cut = len(texts[0]) * (HELD_OUT_SHARE - 1) // HELD_OUT_SHARE
            return cls(texts[0][:cut], texts[0][cut:], 1, 0)._checked(seq)
        order = sorted(range(len(files)), key=lambda i: (zlib.crc32(files[i].name.encode()), i))
        held_out = set(order[: max(1, len(files) // HELD_OUT_SHARE)])
        return cls(
            train=b"".join(text for i, text in enumerate(texts) if i not in held_out),
            held_out=b"".join(text for i, text in enumerate(texts) if i in held_out),
            num_files=len(files),
            num_held_out=len(held_out),
        )._checked(seq)

    def _checked(self, seq: int) -> Corpus:
        if min(len(self.train), len(self.held_out)) <= seq:
            raise ValueError(
                f"the data is too small: {len(self.train)} bytes to train on and {len(self.held_out)} held out, "
                f"but --seq {seq} needs {seq + 1} of each. Give more text or a smaller --seq"
            )
        return self

    def batch(self, step: int, *, batch: int, seq: int, seed: int) -> Tensor:
        """The global batch of one step: (batch, seq + 1) bytes as int64."""
        # One 32-bit number of both: torch's CPU generator looks at no more bits.
        generator = torch.Generator().manual_seed(zlib.crc32(f"seed {seed} step {step}".encode()))
        starts = torch.randint(len(self.train) - seq, (batch,), generator=generator)
        return _windows(self.train, starts.tolist(), seq)

    def held_out_windows(self, count: int, seq: int) -> Tensor:
        """At most `count` windows spread evenly over the held-out bytes, without overlap: (n, seq + 1) as int64."""
        available = (len(self.held_out) - 1) // seq
        n = min(count, available)
        return _windows(self.held_out, [seq * (i * available // n) for i in range(n)], seq)


def _windows(text: bytes, starts: list[int], seq: int) -> Tensor:
    rows = [torch.frombuffer(bytearray(text[start : start + seq + 1]), dtype=torch.uint8) for start in starts]
    return torch.stack(rows).long()
