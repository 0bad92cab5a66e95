"""Shapes of an nn.Module, or of what `package.module:factory` builds on the meta device."""

from __future__ import annotations

import importlib
import os
import sys
from operator import attrgetter
from typing import Any

from ..spec import ParamSpec
from .values import ModelShapes, ShapeError, group_by_block

__all__ = ["build", "from_factory", "from_module"]


def from_module(module: Any, *, model: str = "", source: str = "module") -> ModelShapes:
    """Shapes of an nn.Module; tied parameters count once, and blocks are found as `group_by_block` does."""
    specs = [
        ParamSpec(fqn, tuple(param.shape), str(param.dtype).removeprefix("torch."))
        for fqn, param in module.named_parameters()
    ]
    return ModelShapes(model or type(module).__name__, source, group_by_block(specs))


def from_factory(source: str) -> ModelShapes:
    """Shapes of the module that `build` makes of `package.module:factory`."""
    return from_module(build(source), model=source.partition(":")[2], source=source)


def build(source: str) -> Any:
    """The nn.Module `package.module:name`, or what a factory there returns: it takes no arguments, and gets no memory.

    The current folder is searched first. ShapeError with whatever the user's own code raised.
    """
    import torch

    module_name, _, attribute = source.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        factory = attrgetter(attribute)(importlib.import_module(module_name))
        if isinstance(factory, torch.nn.Module):
            return factory
        with torch.device("meta"):
            module = factory()
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise ShapeError(f"{source}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(module, torch.nn.Module):
        raise ShapeError(f"{source}: the factory returned {type(module).__name__}, expected a torch.nn.Module")
    return module
