"""Plugins by name, and what all wishes for a parameter add up to."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

import pluggy

from ragged_dtensor.granularity import ELEMENT, Granularity

from . import constraints
from .errors import PlanError, PluginError
from .formats import block_format
from .formats.block_format import BlockFormat
from .hookspecs import ENTRY_POINT_GROUP, HookSpecs, LayoutConstraint
from .policy import ParamPolicy

__all__ = ["Named", "Registry", "granularity_of", "register", "registry", "unregister"]

T = TypeVar("T", BlockFormat, LayoutConstraint)

BUILT_IN = "vescale-fsdp"


@dataclass(frozen=True)
class Named(Generic[T]):
    """What a plugin gave, and the distribution that it came with."""

    value: T
    distribution: str


class Registry:
    """Block formats and layout constraints by name; a name belongs to one distribution."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(ENTRY_POINT_GROUP)
        self._manager.add_hookspecs(HookSpecs)
        self._distributions: dict[str, str] = {}
        self.formats: dict[str, Named[BlockFormat]] = {}
        self.constraints: dict[str, Named[LayoutConstraint]] = {}
        self.broken: list[str] = []
        self.register(constraints, distribution=BUILT_IN)

    def register(self, plugin: object, *, distribution: str = "this program") -> None:
        """Add a plugin; PluginError names its distribution, and the hook or the name that is at fault."""
        try:
            key = self._manager.register(plugin)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            self._forget(plugin)
            raise PluginError(f"plugin of {distribution}: {error}") from error
        assert key is not None
        self._distributions[key] = distribution
        try:
            self._rebuild()
        except PluginError:
            self.unregister(plugin)
            raise

    def unregister(self, plugin: object) -> None:
        """Forget a plugin and its names."""
        self._forget(plugin)
        self._rebuild()

    def load(self, points: list[EntryPoint]) -> None:
        """Register what distributions declare. A broken plugin is warned about, and named when something is missing."""
        for point in sorted(points, key=lambda point: (_distribution(point), point.name)):
            try:
                self.register(point.load(), distribution=_distribution(point))
            except PluginError as error:
                self._report(str(error))
            except Exception as error:  # an import may raise anything
                self._report(f"plugin of {_distribution(point)}: {point.value} cannot be imported: {error!r}")

    def format(self, name: str) -> BlockFormat:
        return self._find("block format", self.formats, name).value

    def granularity_of(
        self, fqn: str, shape: tuple[int, ...], policy: ParamPolicy | None, *, stride: int = 1
    ) -> Granularity:
        """What may not be cut, for all who wish: the lcm of their wishes, and their reasons.

        `stride`: elements that one step of a later tensor-parallel Shard(dim) covers, which no cut may fall inside.
        """
        granularity = ELEMENT
        if policy is not None:
            for name in (policy.format, policy.state_format):
                granularity &= self._asked_by_format(shape, name) if name else ELEMENT
            for wish in (policy.optimizer, policy.granularity):
                granularity &= self._asked_by_constraint(fqn, shape, wish) if wish else ELEMENT
        if stride > 1:
            granularity &= _asked(stride, shape, "tensor-parallel stride")
        return granularity

    def unit_bits(self, policy: ParamPolicy | None) -> tuple[int, ...]:
        """Bits per element of everything that the wished formats store."""
        names = (policy.format, policy.state_format) if policy is not None else ()
        return tuple(self.format(name).bits for name in names if name)

    def _asked_by_format(self, shape: tuple[int, ...], name: str) -> Granularity:
        named = self._find("block format", self.formats, name)
        return _asked(block_format.granularity_of(named.value, shape).numel, shape, f"{name} by {named.distribution}")

    def _asked_by_constraint(self, fqn: str, shape: tuple[int, ...], wish: str | int) -> Granularity:
        if isinstance(wish, int):
            return _asked(wish, shape, "asked for as a number")
        name, _, text = wish.partition(":")
        named = self._find("layout constraint", self.constraints, name)
        try:
            numel = named.value.numel(shape, tuple(int(number) for number in text.split("x")) if text else ())
        except ValueError as error:
            raise PlanError(f"{fqn}: {wish!r} of {named.distribution}: {error}") from error
        return _asked(numel, shape, f"{wish} by {named.distribution}")

    def _find(self, what: str, table: Mapping[str, Named[T]], name: str) -> Named[T]:
        if name in table:
            return table[name]
        broken = f" Broken: {'; '.join(self.broken)}." if self.broken else ""
        raise PluginError(f"no {what} is named {name!r}; there are {sorted(table)}. Install the plugin.{broken}")

    def _forget(self, plugin: object) -> None:
        if self._manager.is_registered(plugin):
            self._distributions.pop(self._manager.get_name(plugin) or "", None)
            self._manager.unregister(plugin)

    def _rebuild(self) -> None:
        self.formats = self._collect("vescale_block_formats", BlockFormat)  # type: ignore[type-abstract]
        self.constraints = self._collect("vescale_layout_constraints", LayoutConstraint)  # type: ignore[type-abstract]

    def _collect(self, hook: str, protocol: type[T]) -> dict[str, Named[T]]:
        found: dict[str, Named[T]] = {}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            distribution = self._distributions[implementation.plugin_name]
            for value in _call(implementation.function, hook, distribution):
                if not isinstance(value, protocol):
                    raise PluginError(
                        f"plugin of {distribution}: {hook} gave {value!r}, which is no {protocol.__name__}"
                    )
                _check_value(value, hook, distribution)
                name: str = value.name
                if name in found:
                    other = found[name].distribution
                    raise PluginError(
                        f"{hook}: {name!r} is registered twice, by {other} and by {distribution}. Remove one."
                    )
                found[name] = Named(value, distribution)
        return found

    def _report(self, problem: str) -> None:
        self.broken.append(problem)
        warnings.warn(problem, stacklevel=4)


def _call(function: Callable[[], Any], hook: str, distribution: str) -> list[Any]:
    try:
        return list(function())
    except Exception as error:  # a plugin may raise anything
        raise PluginError(f"plugin of {distribution}: {hook} failed: {error!r}") from error


def _check_value(value: object, hook: str, distribution: str) -> None:
    """What would fail later, far from the plugin's name."""
    name = getattr(value, "name", None)
    if not isinstance(name, str) or not name or ":" in name:
        raise PluginError(f"plugin of {distribution}: {hook} gave {value!r}, whose name {name!r} cannot be asked for")
    if isinstance(value, BlockFormat):
        try:
            block_format.check_format(value)
        except Exception as error:  # attributes of a plugin may be anything
            raise PluginError(f"plugin of {distribution}: {hook} gave {name!r}: {error}") from error


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"


def _asked(numel: int, shape: tuple[int, ...], asked_by: str) -> Granularity:
    """With its reason in the tensor's own terms: "128 rows (fp8_block by vescale-fp8-block)"."""
    return Granularity(numel, (f"{_size(numel, shape)} ({asked_by})",)) if numel > 1 else ELEMENT


def _size(numel: int, shape: tuple[int, ...]) -> str:
    row = shape[-1] if len(shape) == 3 else math.prod(shape[1:])
    if numel >= math.prod(shape):
        return "whole"
    if len(shape) == 3 and numel == shape[1] * shape[2]:
        return "1 expert"
    if len(shape) > 1 and numel % row == 0:
        return f"{numel // row} row" if numel == row else f"{numel // row} rows"
    return f"{numel} elements"


@cache
def registry() -> Registry:
    """The registry of this process; distributions are asked when it is first used, not when we are imported."""
    made = Registry()
    made.load(list(entry_points(group=ENTRY_POINT_GROUP)))
    return made


def register(plugin: object, *, distribution: str = "this program") -> None:
    """Add a plugin that no distribution declares: for notebooks and tests; `unregister` undoes it."""
    registry().register(plugin, distribution=distribution)


def unregister(plugin: object) -> None:
    """Undo `register`."""
    registry().unregister(plugin)


def granularity_of(fqn: str, shape: tuple[int, ...], policy: ParamPolicy | None, *, stride: int = 1) -> Granularity:
    """What may not be cut of a parameter, given its global shape and its policy; None wishes nothing."""
    if policy is None and stride == 1:
        return ELEMENT
    return registry().granularity_of(fqn, shape, policy, stride=stride)
