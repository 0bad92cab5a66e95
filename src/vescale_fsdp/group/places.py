"""Where modules hold a group's parameters: sharded ones at rest, gathered ones while they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from ..guards import Trap
from ..managed import ManagedParam

__all__ = ["Places"]

TRAP = "vescale_fsdp.Trap"
"""The key of our hook among a module's own."""


class Places:
    """The places in modules that hold a group's parameters, and the traps on inner modules while those are sharded."""

    def __init__(self, managed: Sequence[ManagedParam], wrapped: Sequence[nn.Module]) -> None:
        fqns: dict[nn.Module, list[str]] = {}
        for each in managed:
            for module, _ in each.owners:
                if module not in wrapped:
                    fqns.setdefault(module, []).append(each.fqn)
        self._traps = [
            (cast(Any, module)._forward_pre_hooks, Trap(names, wrapped[0])) for module, names in fqns.items()
        ]
        self._fast: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        self._slow: list[tuple[nn.Module, str, int]] = []
        for i, each in enumerate(managed):
            for module, name in each.owners:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    self._fast.append((module._parameters, name, i))
                else:
                    self._slow.append((module, name, i))

    def hold(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether the modules hold these very parameters."""
        return all(parameters.get(name) is params[i] for parameters, name, i in self._fast)

    def put(self, params: Sequence[nn.Parameter], *, sharded: bool) -> None:
        # nn.Module.__setattr__ checks what we know, and costs ten times as much.
        for parameters, name, i in self._fast:
            parameters[name] = params[i]
        for module, name, i in self._slow:
            setattr(module, name, params[i])
        # Hooks that are always there would cost every forward; these are gone while the parameters are usable.
        for hooks, trap in self._traps:
            if sharded:
                hooks[TRAP] = trap
            else:
                hooks.pop(TRAP, None)

    def release(self) -> None:
        for hooks, _ in self._traps:
            hooks.pop(TRAP, None)
