"""What ranks settle about a model's groups before its first use: their names, and that all have the same plans."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from .group.param_group import ParamGroup
from .plan import Plan
from .preflight import Circle, settle
from .replicas import check_replicas

__all__ = ["circles_of", "log_plan", "name_groups", "settle_groups"]

logger = logging.getLogger("vescale_fsdp")


def name_groups(root: nn.Module, wrapped: Iterable[tuple[Sequence[nn.Module], Sequence[ParamGroup]]]) -> None:
    """Give the groups of all `wrapped` modules the names that modules and parameters have below the root."""
    names = {module: name for name, module in root.named_modules()}
    for modules, groups in wrapped:
        module_name = ", ".join(names[module] for module in modules) or "root"
        for group in groups:
            suffix = f" [{group.kind}]" if len(groups) > 1 else ""
            group.prepare(module_name + suffix, [each.name_below(names) for each in group.shards.managed])


def circles_of(groups: Iterable[ParamGroup]) -> list[Circle]:
    """One for each data mesh, and what its parameters are sharded on besides."""
    on_mesh: dict[int, list[ParamGroup]] = {}
    for group in groups:
        on_mesh.setdefault(id(group.mesh.group), []).append(group)
    return [Circle.of(each[0].mesh, (p for group in each for p in group.shards.params)) for each in on_mesh.values()]


def settle_groups(groups: Sequence[ParamGroup], circles: Sequence[Circle]) -> None:
    """Compare plans among ranks, and values among replicas; what one rank finds, all raise."""
    settle(circles, [_plan_on(circle, groups) for circle in circles])
    check_replicas(groups, circles)


def _plan_on(circle: Circle, groups: Sequence[ParamGroup]) -> Plan:
    return Plan(tuple(group.plan for group in groups if group.mesh.group is circle.mesh.group))


def log_plan(root: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """One line, from rank 0."""
    if not dist.is_initialized() or dist.get_rank() != 0:
        return
    plan = Plan(tuple(group.plan for group in groups))
    logger.info(
        f"{type(root).__name__}: {plan.numel:,} parameters in {len(plan.groups)} groups, {plan.nbytes / 2**20:.3f} MiB "
        f"per rank, {plan.padding_pct:.2f} % padding"
    )
