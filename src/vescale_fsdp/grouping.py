"""Which parameters of one `fully_shard` call form a group, and where their elements go.

Parameters are gathered together if they have one dtype, one trainability (a frozen parameter then costs no gradient
memory) and one block format. What `param_policy` wishes for each becomes the granularity of its plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .block_format import BlockFormat
from .errors import VescaleError
from .managed import ManagedParam
from .mesh import DataMesh
from .plan import GroupPlan
from .planner import plan_group
from .plugins import granularity_of, registry
from .policy import MixedPrecisionPolicy, ParamPolicy
from .spec import ALIGNMENT_BITS, ParamSpec, alignment

__all__ = ["Members", "ParamPolicyFn", "plan_groups"]

ParamPolicyFn = Callable[[str, nn.Parameter], ParamPolicy | None]


@dataclass(frozen=True, eq=False)
class Members:
    """The parameters of one group; `format` is the block format that they are gathered in, if any."""

    managed: tuple[ManagedParam, ...]
    plan: GroupPlan
    format: BlockFormat | None


def plan_groups(
    managed: Sequence[ManagedParam],
    mesh: DataMesh,
    mp_policy: MixedPrecisionPolicy,
    *,
    param_policy: ParamPolicyFn | None,
    max_lanes: int | None,
) -> list[Members]:
    """Ask for each parameter's policy, and plan the groups. The same on every rank: only names and shapes decide."""
    groups: dict[tuple[torch.dtype, bool, str | None], list[tuple[ManagedParam, ParamPolicy | None]]] = {}
    for each in managed:
        policy = _policy(each, param_policy)
        key = each.param.dtype, each.param.requires_grad, policy.format if policy is not None else None
        groups.setdefault(key, []).append((each, policy))
    return [
        Members(
            tuple(each for each, _ in members),
            _plan(members, mesh, mp_policy, max_lanes),
            registry().format(format) if format is not None else None,
        )
        for (_, _, format), members in groups.items()
    ]


def _policy(managed: ManagedParam, param_policy: ParamPolicyFn | None) -> ParamPolicy | None:
    if param_policy is None:
        return None
    policy = param_policy(managed.fqn, managed.param)
    if policy is None:
        return None
    if not isinstance(policy, ParamPolicy):
        raise VescaleError(f"{managed.fqn}: param_policy gives a ParamPolicy or None, got {policy!r}")
    if policy.format is not None and not managed.param.is_floating_point():
        raise VescaleError(
            f"{managed.fqn}: a block format holds floating-point values, but the parameter is {managed.param.dtype}. "
            f"Let param_policy give no format for it."
        )
    return policy


def _plan(
    members: Sequence[tuple[ManagedParam, ParamPolicy | None]],
    mesh: DataMesh,
    mp_policy: MixedPrecisionPolicy,
    max_lanes: int | None,
) -> GroupPlan:
    specs = []
    for each, policy in members:
        shape = tuple(each.param.shape)
        specs.append(ParamSpec(each.fqn, shape, _name(each.param.dtype), granularity_of(each.fqn, shape, policy)))
    dtypes = {members[0][0].param.dtype, mp_policy.param_dtype, mp_policy.reduce_dtype, torch.bfloat16}
    bits = {bits for _, policy in members if policy is not None for bits in registry().unit_bits(policy)}
    unit = math.lcm(
        alignment(_name(dtype) for dtype in dtypes if dtype is not None),
        *(ALIGNMENT_BITS // math.gcd(ALIGNMENT_BITS, each) for each in bits),
    )
    return plan_group(specs, mesh.num_ranks, unit=unit, align=unit, max_lanes=max_lanes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
