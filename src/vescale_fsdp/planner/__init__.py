"""Where each parameter's elements go: specs in, Plan out.

Reading order:

    problem greedy bounds classes orders dives beam targets one_lane rows parts splits lanes groups

Integers only: no torch, no process group, no clock, so every rank finds the same plan.
"""

from __future__ import annotations

from .groups import MAX_LANES, make_plan, plan_group

__all__ = ["MAX_LANES", "make_plan", "plan_group"]
