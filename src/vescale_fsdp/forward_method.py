"""Other methods than `forward` that use a wrapped module's parameters."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

from .module import FSDPModule

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather before `module.<method_name>` and free after it, as for `forward`; other modules stay as they are.

    `generate`, `encode` and the like otherwise meet sharded parameters.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        assert isinstance(self, nn.Module)
        args, kwargs = state.before_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            state.abandon_forward()
            raise
        return state.after_forward(self, args, output)

    setattr(module, method_name, MethodType(wrapped, module))
