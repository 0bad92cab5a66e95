"""Which parameters of one `fully_shard` call form a group, and where their elements go.

Parameters are gathered together if they have one data mesh, one dtype, one trainability (a frozen parameter then costs
no gradient memory) and one block format. What `param_policy` wishes for each, and what tensor parallelism has cut
already, becomes the granularity of its plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ragged_dtensor import Granularity

from .errors import VescaleError
from .formats.block_cuts import check_other_cuts
from .formats.block_format import BlockFormat
from .group.encoded_group import is_handed
from .group.extensions import is_extension
from .home import Home
from .managed import ManagedParam
from .mesh import DataMesh, NamedAxes
from .plan import GroupPlan
from .planner import plan_group
from .plugins import granularity_of, registry
from .policy import MixedPrecisionPolicy, ParamPolicy
from .spec import ALIGNMENT_BITS, ParamSpec, alignment

__all__ = ["Members", "ParamPolicyFn", "PlacementFn", "plan_groups"]

ParamPolicyFn = Callable[[str, nn.Parameter], ParamPolicy | None]
PlacementFn = Callable[[nn.Parameter], Any]
"""torch's `shard_placement_fn`: gives a Shard, a ShardPlacementResult (which has no public name) or None."""


@dataclass(frozen=True, eq=False)
class Members:
    """The parameters of one group and their ranks; `format` is the block format that they are gathered in, if any."""

    mesh: DataMesh
    managed: tuple[ManagedParam, ...]
    plan: GroupPlan
    format: BlockFormat | None
    gathers_itself: bool
    """Tensor subclasses with methods for that; they are cut between rows."""


def plan_groups(
    managed: Sequence[ManagedParam],
    mesh: DataMesh,
    mp_policy: MixedPrecisionPolicy,
    *,
    placement_fn: PlacementFn | None,
    param_policy: ParamPolicyFn | None,
    max_lanes: int | None,
) -> list[Members]:
    """Ask for each parameter's policy, and plan the groups. The same on every rank: only names and shapes decide."""
    groups: dict[tuple[Any, ...], list[tuple[ManagedParam, ParamPolicy | None]]] = {}
    meshes: dict[object, DataMesh] = {}
    for each in managed:
        policy = _policy(each, param_policy)
        placed = placement_fn(each.param) if placement_fn is not None else None
        its_mesh = _mesh_of(each, placed, mesh, meshes)
        each = replace(each, home=Home.of(each.fqn, each.param, its_mesh))
        _check_blocks(each, policy)
        format = policy.format if policy is not None else None
        handed = format is not None and is_handed(each)
        key = its_mesh, each.param.dtype, each.param.requires_grad, format, handed, is_extension(each.param)
        groups.setdefault(key, []).append((each, policy))
    return [
        Members(
            its_mesh,
            tuple(each for each, _ in members),
            _plan(members, its_mesh, mp_policy, max_lanes),
            registry().format(format) if format is not None else None,
            gathers_itself,
        )
        for (its_mesh, _, _, format, _, gathers_itself), members in groups.items()
    ]


def _mesh_of(managed: ManagedParam, placed: Any, mesh: DataMesh, meshes: dict[object, DataMesh]) -> DataMesh:
    """The mesh that torch's `ShardPlacementResult` names, or the call's own.

    The dim that the result names is checked and not followed: a ragged cut takes any number of ranks along any dim.
    """
    info = getattr(placed, "mesh_info", None)
    placement = placed if info is None else placed.placement
    if placement is not None and not isinstance(placement, Shard):
        raise ValueError(f"{managed.fqn}: Invalid shard_placement_fn result: {placed}")
    ndim = managed.param.ndim
    if placement is not None and not -ndim <= placement.dim < ndim:
        raise VescaleError(f"{managed.fqn}: shard_placement_fn gave {placement}, but the parameter has {ndim} dims")
    if info is None:
        return mesh
    if info.mesh is mesh.mesh and (info.shard_mesh_dim, info.replicate_mesh_dim) == (
        mesh.shard_axis,
        mesh.replicate_axis,
    ):
        return mesh
    named = NamedAxes(info.spmd_mesh, info.dp_mesh_dims) if getattr(info, "dp_mesh_dims", None) is not None else None
    own = DataMesh(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim, named)
    if isinstance(managed.param, DTensor) and own.global_ranks < mesh.global_ranks:
        # The other data ranks hold other experts, and sent their tokens here: gradients sum what all of them saw.
        own = replace(own, num_contributions=len(mesh.global_ranks))
    return meshes.setdefault((info.mesh, own.shard_axis, own.replicate_axis, own.num_contributions), own)


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
    if policy.format is not None and is_extension(managed.param):
        raise NotImplementedError(
            f"{managed.fqn}: a {type(managed.param.data).__name__} gathers itself (fsdp_pre_all_gather), so that "
            f"format {policy.format!r} would do nothing. Let param_policy give no format for it."
        )
    return policy


def _check_blocks(managed: ManagedParam, policy: ParamPolicy | None) -> None:
    """Other parallelisms leave the blocks of wished formats whole: encoding a rank's part knows nothing beside it."""
    home = managed.home
    if policy is None or home is None or home.given is None:
        return
    if policy.format is not None and home.is_uneven:
        raise NotImplementedError(
            f"{managed.fqn}: {home.around} on {home.mesh} leaves unequal parts of {tuple(managed.param.shape)}, which "
            f"format {policy.format!r} is not built for. Let param_policy give no format for it."
        )
    cuts = [(each.dim, home.mesh.size(axis)) for axis, each in enumerate(home.around) if isinstance(each, Shard)]
    for name in (policy.format, policy.state_format):
        if name is not None:
            check_other_cuts(managed.fqn, tuple(managed.param.shape), cuts, registry().format(name))


def _plan(
    members: Sequence[tuple[ManagedParam, ParamPolicy | None]],
    mesh: DataMesh,
    mp_policy: MixedPrecisionPolicy,
    max_lanes: int | None,
) -> GroupPlan:
    specs = []
    for each, policy in members:
        assert each.home is not None
        shape = each.home.largest
        granularity = granularity_of(each.fqn, shape, policy, stride=each.home.stride)
        spec = ParamSpec(each.fqn, shape, _name(each.param.dtype), granularity)
        specs.append(_with_rows(spec) if is_extension(each.param) else spec)
    dtypes = {members[0][0].param.dtype, mp_policy.param_dtype, mp_policy.reduce_dtype, torch.bfloat16}
    bits = {bits for _, policy in members if policy is not None for bits in registry().unit_bits(policy)}
    unit = math.lcm(
        alignment(_name(dtype) for dtype in dtypes if dtype is not None),
        *(ALIGNMENT_BITS // math.gcd(ALIGNMENT_BITS, each) for each in bits),
    )
    plan = plan_group(specs, mesh.num_ranks, unit=unit, align=unit, max_lanes=max_lanes)
    if mesh.num_ranks == 1 or all(len(spec.shape) < 2 for spec in specs):
        return plan
    # Cuts between rows, where those take no larger share: local tensors then keep their number of dims.
    rowwise = [_with_rows(spec) for spec in specs]
    by_rows = plan_group(rowwise, mesh.num_ranks, unit=unit, align=unit, max_lanes=len(plan.lanes))
    return replace(by_rows, specs=tuple(specs)) if by_rows.share == plan.share else plan


def _with_rows(spec: ParamSpec) -> ParamSpec:
    row = math.prod(spec.shape[1:])
    return replace(spec, granularity=spec.granularity & Granularity(row)) if row > 1 else spec


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
