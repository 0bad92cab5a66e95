"""Pictures of plans and of sweeps; they need the `viz` extra (matplotlib), which is imported when one is drawn.

Reading order: geometry, style, families, lane, of_plan, of_advice.
"""

from __future__ import annotations

from .of_advice import draw_advice
from .of_plan import draw_plan

__all__ = ["draw_advice", "draw_plan"]
