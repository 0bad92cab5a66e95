"""What a model consists of before any weight exists: groups of parameter specs, equal groups written once.

A group is what one communication call moves: usually one block of the model, and the rest as "root". Blocks that repeat
are one `ShapeGroup` with several prefixes:

    ShapeGroup(("layers.0", "layers.1"), (ParamSpec("layers.0.w", (8, 4)),))    two copies of one 32-element tensor
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ..errors import VescaleError
from ..spec import ParamSpec, alignment

__all__ = ["ModelShapes", "ShapeError", "ShapeGroup", "group_by_block", "merge_equal"]

ROOT = "root"


class ShapeError(VescaleError):
    """Input that does not describe a model; the message names the file, the entry and the reason."""


@dataclass(frozen=True)
class ShapeGroup:
    """One communication group and its copies: `specs` are the first copy's, `prefixes` say where each copy lives.

    `code_bits` are the sizes of the codes that block formats store beside the parameters' own dtype.
    """

    prefixes: tuple[str, ...]
    specs: tuple[ParamSpec, ...]
    code_bits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ShapeError("a group has at least one copy, got none")

    @property
    def count(self) -> int:
        return len(self.prefixes)

    @property
    def numel(self) -> int:
        """Elements of one copy."""
        return sum(spec.numel for spec in self.specs)

    @property
    def unit(self) -> int:
        """Elements that shares are multiples of: 16 bytes in everything that is stored."""
        codes = (128 // math.gcd(128, bits) for bits in self.code_bits)
        return math.lcm(alignment({spec.dtype for spec in self.specs}), *codes)

    @property
    def name(self) -> str:
        """`layers.0`, or `layers.0-2, layers.5` for the copies 0, 1, 2 and 5."""
        return ", ".join(_ranges(self.prefixes))

    def copies(self) -> Iterator[ShapeGroup]:
        """Every copy as a group of its own, with its own fqns."""
        first = self.prefixes[0]
        for prefix in self.prefixes:
            specs = tuple(replace(spec, fqn=_moved(spec.fqn, first, prefix)) for spec in self.specs)
            yield replace(self, prefixes=(prefix,), specs=specs)


@dataclass(frozen=True)
class ModelShapes:
    """A named model: its groups in module order. `source` is where the shapes were read."""

    model: str
    source: str
    groups: tuple[ShapeGroup, ...]

    def __post_init__(self) -> None:
        if not any(group.specs for group in self.groups):
            raise ShapeError(f"{self.source}: no parameters found")

    @property
    def numel(self) -> int:
        return sum(group.numel * group.count for group in self.groups)

    @property
    def specs(self) -> Iterator[ParamSpec]:
        """Every parameter of every copy."""
        return (spec for group in self.groups for copy in group.copies() for spec in copy.specs)

    def with_groups(self, groups: Iterable[ShapeGroup]) -> ModelShapes:
        return replace(self, groups=tuple(groups))

    def with_dtype(self, dtype: str) -> ModelShapes:
        """The same model stored in another dtype."""
        return self.with_groups(
            replace(group, specs=tuple(replace(spec, dtype=dtype) for spec in group.specs)) for group in self.groups
        )

    def split_dtypes(self) -> ModelShapes:
        """One group per dtype: a communication buffer holds one."""
        return self.with_groups(part for group in self.groups for part in _by_dtype(group))


def group_by_block(specs: Sequence[ParamSpec], patterns: Sequence[str] = ()) -> tuple[ShapeGroup, ...]:
    """Group parameters by the block that they belong to; what is in no block becomes "root", in front.

    Without patterns, blocks are the entries of each outermost numbered container (`layers.0`, `layers.1`, ...) that has
    at least two entries of the same names and shapes. With patterns, blocks are the modules that match one: `layers.*`
    is each layer, `*.experts.*` each expert, `none` nothing at all.
    """
    for pattern in patterns:
        if pattern != "none" and not any(map(_matching_prefix([pattern]), (spec.fqn for spec in specs))):
            like = f"parameters have names like {specs[-1].fqn}" if specs else "there are no parameters"
            raise ShapeError(f"group_by {pattern!r}: matches no module; {like}")
    prefix_of = _matching_prefix(patterns) if patterns else _numbered_prefix(specs)
    blocks: dict[str, list[ParamSpec]] = {ROOT: []}
    for spec in specs:
        blocks.setdefault(prefix_of(spec.fqn) or ROOT, []).append(spec)
    return merge_equal(ShapeGroup((prefix,), tuple(members)) for prefix, members in blocks.items() if members)


def merge_equal(groups: Iterable[ShapeGroup]) -> tuple[ShapeGroup, ...]:
    """Write groups that differ in their prefix only once, at the place of the first."""
    merged: dict[object, ShapeGroup] = {}
    for group in groups:
        first = group.prefixes[0]
        tensors = tuple((_relative(s.fqn, first), s.shape, s.dtype, s.granularity) for s in group.specs)
        key = (tensors, group.code_bits)
        known = merged.get(key)
        merged[key] = group if known is None else replace(known, prefixes=known.prefixes + group.prefixes)
    return tuple(merged.values())


def _matching_prefix(patterns: Sequence[str]) -> Callable[[str], str | None]:
    """Of an fqn: the module path that matches the first fitting pattern, component by component."""
    wanted = [pattern.split(".") for pattern in patterns if pattern != "none"]

    def prefix_of(fqn: str) -> str | None:
        path = fqn.split(".")
        for pattern in wanted:
            if len(pattern) < len(path) and all(map(fnmatchcase, path, pattern)):
                return ".".join(path[: len(pattern)])
        return None

    return prefix_of


def _numbered_prefix(specs: Sequence[ParamSpec]) -> Callable[[str], str | None]:
    """Of an fqn: its path up to the first number, if the entries of that container repeat."""
    entries: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for spec in specs:
        if prefix := _first_number(spec.fqn):
            entries.setdefault(prefix, []).append((spec.fqn[len(prefix) :], spec.shape))
    times = Counter((prefix.rpartition(".")[0], tuple(members)) for prefix, members in entries.items())
    containers = {container for (container, _), count in times.items() if count > 1}

    def prefix_of(fqn: str) -> str | None:
        prefix = _first_number(fqn)
        return prefix if prefix and prefix.rpartition(".")[0] in containers else None

    return prefix_of


def _first_number(fqn: str) -> str | None:
    path = fqn.split(".")
    for position, part in enumerate(path[:-1]):
        if part.isdigit():
            return ".".join(path[: position + 1])
    return None


def _relative(fqn: str, prefix: str) -> str:
    return fqn[len(prefix) :] if fqn.startswith(prefix + ".") else fqn


def _moved(fqn: str, old: str, new: str) -> str:
    if old == new:
        return fqn
    return new + fqn[len(old) :] if fqn.startswith(old + ".") else f"{new}.{fqn}"


def _by_dtype(group: ShapeGroup) -> Iterator[ShapeGroup]:
    dtypes = dict.fromkeys(spec.dtype for spec in group.specs)
    for dtype in dtypes:
        yield replace(group, specs=tuple(spec for spec in group.specs if spec.dtype == dtype))


def _ranges(prefixes: Sequence[str]) -> list[str]:
    runs: list[list[str]] = []
    for prefix in prefixes:
        if runs and _follows(runs[-1][-1], prefix):
            runs[-1].append(prefix)
        else:
            runs.append([prefix])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}" for run in runs]


def _follows(one: str, two: str) -> bool:
    (head, _, number), (other, _, following) = one.rpartition("."), two.rpartition(".")
    return head == other and number.isdigit() and following.isdigit() and int(number) + 1 == int(following)
