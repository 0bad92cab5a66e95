"""Models of public shapes without memory: every parameter gets a gradient of its own size, activations are scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp.shapes import ModelShapes, ShapeGroup, read_shapes

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"


class Sums(nn.Module):
    """Adds the sum of each of its parameters to what comes in."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(tuple(shape))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.parameters(recurse=False):
            x = x + param.sum()
        return x


class SumsOfShapes(nn.Module):
    """The first parameter of the root, the layers, and the others of the root."""

    def __init__(self, shapes: ModelShapes) -> None:
        super().__init__()
        root, *groups = shapes.groups
        first, *others = [spec.shape for spec in root.specs]
        self.embed = Sums([first])
        self.blocks = nn.ModuleList(_layer(copy) for group in groups for copy in group.copies())
        self.head = Sums(others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _layer(group: ShapeGroup) -> Sums:
    return Sums([spec.shape for spec in group.specs])


def shapes_of(name: str, num_layers: int | None = None) -> ModelShapes:
    """A file of benchmarks/models, with so many of its layers."""
    shapes = read_shapes(str(MODELS / f"{name}.json"))
    root, layers = shapes.groups
    return replace(shapes, groups=(root, replace(layers, prefixes=layers.prefixes[:num_layers])))


def wrapped_sums(shapes: ModelShapes, shard: Callable[..., object], **kwargs: Any) -> SumsOfShapes:
    model = SumsOfShapes(shapes)
    for block in model.blocks:
        shard(block, **kwargs)
    shard(model, **kwargs)
    return model
