"""Where the planner may cut a parameter of SOAP: between panels of as many rows as a block has."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SoapPanels"]


@dataclass(frozen=True)
class SoapPanels:
    """`soap:1024`: cuts every 1024 rows; an expert of a stack that they do not divide stays whole."""

    name: str = "soap"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        rows = size[0] if size else 1024
        if len(shape) == 3:
            return max(1, (rows if shape[1] % rows == 0 else shape[1]) * shape[2])
        return max(1, rows * math.prod(shape[1:])) if len(shape) > 1 else 1
