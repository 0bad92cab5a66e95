"""SOAP for vescale-fsdp: an optimizer, and the layout that keeps its panels where they are.

Reading order: basis, soap, layout.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_fsdp import hookimpl

from .layout import SoapPanels
from .soap import SOAP

__all__ = ["SOAP", "SoapPanels", "vescale_layout_constraints"]


@hookimpl
def vescale_layout_constraints() -> Iterable[SoapPanels]:
    return (SoapPanels(),)
