"""What a plugin may give: block formats, and constraints on where a parameter may be cut. Two hooks, by pluggy.

A plugin is any object (a module, mostly) with functions marked by `hookimpl`:

    from vescale_fsdp.hookspecs import hookimpl

    @hookimpl
    def vescale_block_formats():
        return [MyFormat()]

It is found through the entry-point group "vescale_fsdp" of its distribution,

    [project.entry-points.vescale_fsdp]
    my_format = "my_package.plugin"

or given to `vescale_fsdp.plugins.register`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import pluggy

from .formats.block_format import BlockFormat

__all__ = ["ENTRY_POINT_GROUP", "HookSpecs", "LayoutConstraint", "hookimpl", "hookspec"]

ENTRY_POINT_GROUP = "vescale_fsdp"
"""Also pluggy's name for the project."""

hookspec = pluggy.HookspecMarker(ENTRY_POINT_GROUP)
hookimpl = pluggy.HookimplMarker(ENTRY_POINT_GROUP)


@runtime_checkable
class LayoutConstraint(Protocol):
    """Where an optimizer, or a user, lets a parameter be cut. Pure: the global shape decides, never a rank's part.

    Asked for as `ParamPolicy(optimizer="shampoo")` or `ParamPolicy(granularity="rows:16")`; what stands behind the
    colon, numbers joined by "x", arrives as `size`, () if nothing does.
    """

    @property
    def name(self) -> str: ...

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        """Elements of the flattened tensor that may not be cut, counted from its start; at least 1."""
        ...


class HookSpecs:
    """The hooks. Each is called once per plugin, when the first wish names a plugin."""

    @hookspec
    def vescale_block_formats(self) -> Iterable[BlockFormat]:
        """Formats that parameters can be gathered in, or optimizer state kept in."""
        raise NotImplementedError

    @hookspec
    def vescale_layout_constraints(self) -> Iterable[LayoutConstraint]:
        """Constraints of optimizers; they may carry the optimizer's name."""
        raise NotImplementedError
