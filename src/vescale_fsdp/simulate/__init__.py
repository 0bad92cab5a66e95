"""What a training step would take and hold at any number of ranks, computed from a plan: no process group, no GPU.

Reading order: machine, workload, engine, memory, step, scaling, chart. The model is stated in docs/simulate.md.
"""

from __future__ import annotations

from .chart import draw_scaling
from .engine import FSDP2, OURS, Engine, GroupCost
from .machine import MACHINES, Link, Machine, Moves, read_machine
from .memory import Memory, memory_of
from .scaling import Point, Scaling, scale
from .step import StepTime, time_of
from .workload import Workload

__all__ = [
    "FSDP2",
    "MACHINES",
    "OURS",
    "Engine",
    "GroupCost",
    "Link",
    "Machine",
    "Memory",
    "Moves",
    "Point",
    "Scaling",
    "StepTime",
    "Workload",
    "draw_scaling",
    "memory_of",
    "read_machine",
    "scale",
    "time_of",
]
