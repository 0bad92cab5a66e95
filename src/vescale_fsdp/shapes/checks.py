"""What every reader of shapes asks of its input; each error names the file, the entry and the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .values import ShapeError

__all__ = ["brief", "is_int", "load_json", "refuse_duplicates", "shape_of", "unique_keys"]


def load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ShapeError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ShapeError(f"{path}: expected a JSON object, got {brief(value)}")
    return value


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key come twice, and Python keeps the last; here it is an error."""
    refuse_duplicates("keys", [key for key, _ in pairs])
    return dict(pairs)


def refuse_duplicates(where: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ShapeError(f"{where}: {name} comes twice; every name must be unique")
        seen.add(name)


def shape_of(where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(is_int(size) and size >= 0 for size in value):
        raise ShapeError(f"{where}: shape: expected a list of whole numbers >= 0, got {brief(value)}")
    return tuple(value)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
