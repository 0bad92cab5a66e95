"""What the command line asks for: rows, blocks or a format, for all parameters or for those whose name matches.

    --rows 128                    128 rows of every parameter stay together
    --rows 'layers.*.norm=1'      ... but for these one row; of several --rows that match, the last one counts
    --block '*.w1=128x128'        128x128 blocks stay whole; another kind of wish adds to --rows, as the lcm of both
    --format fp8_block            what a registered format asks for

Without a pattern, blocks and formats are for matrices only: parameters of two dims or more.

A row of a parameter is what one step along its first dim skips: prod(shape[1:]) elements, but shape[-1] for 3-D ones
(fused experts) and one element for 1-D ones. N rows are N times that, wherever they start: (128, 2880, 2880) with 16
rows may be cut every 46080 elements. `--rows whole` keeps every matrix on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ragged_dtensor.granularity import Granularity

from .errors import PluginError, VescaleError
from .formats.tiling import Tiling
from .plugins import granularity_of, registry
from .policy import ParamPolicy
from .shapes import ModelShapes, ShapeGroup, merge_equal
from .shapes.checks import brief
from .spec import ParamSpec

__all__ = ["Wish", "WishError", "grant", "parse_wish"]

Kind = Literal["rows", "block", "format"]

MAX_DIGITS = 18
"""No tensor has as many rows."""


class WishError(VescaleError):
    """A --rows, --block or --format that means nothing, or that matches no parameter."""


@dataclass(frozen=True)
class Wish:
    """`asks(spec)` is the granularity for a parameter whose fqn matches `pattern`."""

    kind: Kind
    pattern: str
    value: str
    asks: Callable[[ParamSpec], Granularity]
    code_bits: tuple[int, ...] = ()

    def covers(self, spec: ParamSpec) -> bool:
        if self.pattern == "*":
            return self.kind == "rows" or len(spec.shape) > 1
        return fnmatchcase(spec.fqn, self.pattern)

    def __str__(self) -> str:
        return f"--{self.kind} {self.value}" if self.pattern == "*" else f"--{self.kind} {self.pattern}={self.value}"


def parse_wish(kind: Kind, text: str) -> Wish:
    """Read `VALUE` or `PATTERN=VALUE`."""
    pattern, equals, value = text.rpartition("=")
    if equals and not pattern:
        raise WishError(f"--{kind} {text}: expected VALUE or PATTERN=VALUE, got an empty pattern")
    bits = (registry().format(value).bits,) if kind == "format" and value in registry().formats else ()
    return Wish(kind, pattern or "*", value, _PARSERS[kind](value), bits)


def grant(shapes: ModelShapes, wishes: Sequence[Wish]) -> ModelShapes:
    """The model with each parameter's granularity; copies that are no longer equal become groups of their own."""
    if not wishes:
        return shapes
    groups = shapes.groups
    if any(wish.pattern != "*" for wish in wishes):
        groups = tuple(copy for group in shapes.groups for copy in group.copies())
        _refuse_unused(wishes, [spec.fqn for group in groups for spec in group.specs])
    return shapes.with_groups(merge_equal(_granted(group, wishes) for group in groups))


def _granted(group: ShapeGroup, wishes: Sequence[Wish]) -> ShapeGroup:
    specs, bits = [], set(group.code_bits)
    for spec in group.specs:
        granularity = spec.granularity
        for wish in {wish.kind: wish for wish in wishes if wish.covers(spec)}.values():  # the last of each kind
            granularity = granularity & wish.asks(spec)
            bits.update(wish.code_bits)
        specs.append(replace(spec, granularity=granularity))
    return replace(group, specs=tuple(specs), code_bits=tuple(sorted(bits)))


def _refuse_unused(wishes: Sequence[Wish], fqns: Sequence[str]) -> None:
    for wish in wishes:
        if not any(fnmatchcase(fqn, wish.pattern) for fqn in fqns):
            raise WishError(f"{wish}: matches no parameter; their names are like {fqns[-1]}")


def _parse_rows(value: str) -> Callable[[ParamSpec], Granularity]:
    if value == "whole":
        return lambda spec: Granularity(max(spec.numel, 1), ("whole (--rows)",))
    rows = _whole_number("rows", value, value)

    def asks(spec: ParamSpec) -> Granularity:
        shape = spec.shape
        row = shape[-1] if len(shape) == 3 else math.prod(shape[1:])
        return Granularity(max(rows * row, 1) if shape else 1, (f"{rows} rows (--rows)",) if rows > 1 else ())

    return asks


def _parse_block(value: str) -> Callable[[ParamSpec], Granularity]:
    rows_text, by, columns_text = value.partition("x")
    if not by:
        raise WishError(f"--block {value}: expected NxM, such as 128x128")
    rows, columns = _whole_number("block", value, rows_text), _whole_number("block", value, columns_text)
    text = f"{rows}x{columns} blocks (--block)"
    return lambda spec: Granularity(Tiling((rows, columns), spec.shape).granularity, (text,))


def _parse_format(value: str) -> Callable[[ParamSpec], Granularity]:
    try:
        registry().format(value)
    except PluginError as error:
        raise WishError(f"--format {value}: {error}") from None
    policy = ParamPolicy(format=value)
    return lambda spec: granularity_of(spec.fqn, spec.shape, policy)


def _whole_number(kind: Kind, value: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS or int(text) < 1:
        raise WishError(f"--{kind} {value[:40]}: expected a whole number >= 1, got {brief(text)}")
    return int(text)


_PARSERS: dict[Kind, Callable[[str], Callable[[ParamSpec], Granularity]]] = {
    "rows": _parse_rows,
    "block": _parse_block,
    "format": _parse_format,
}
