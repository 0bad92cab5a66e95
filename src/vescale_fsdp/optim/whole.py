"""Which matrices may lie whole on one rank: as many as a bound on padding allows, so that Muon need not move them.

    for block in model.blocks:
        fully_shard(block, param_policy=whole_matrices(block, num_ranks=8, max_padding_pct=2.0))

A matrix that lies whole on one rank is orthogonalized there. Asking for all of them can pad a group a lot (seven
matrices on eight ranks), so the smallest matrices are granted first, and as many as the bound allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from vescale_fsdp.plan import GroupPlan
from vescale_fsdp.planner import plan_group
from vescale_fsdp.plugins import granularity_of
from vescale_fsdp.policy import ParamPolicy
from vescale_fsdp.spec import ParamSpec

__all__ = ["whole_matrices"]

WISH = ParamPolicy(optimizer="muon")


def whole_matrices(
    module: nn.Module, num_ranks: int, *, max_padding_pct: float = 2.0
) -> Callable[[str, nn.Parameter], ParamPolicy | None]:
    """A `param_policy` for a `fully_shard(module)` whose parameters of one dtype form one group.

    It wishes for whole matrices (the layout constraint "muon") of as many parameters, the smallest first, as keep the
    padding within `max_padding_pct` percent of the group's elements, or within what it has without any wish.
    """
    by_dtype: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for fqn, param in module.named_parameters():
        by_dtype.setdefault(str(param.dtype).removeprefix("torch."), []).append((fqn, param))
    granted: set[int] = set()
    for params in by_dtype.values():
        granted |= _granted(params, num_ranks, max_padding_pct)

    def policy(fqn: str, param: nn.Parameter) -> ParamPolicy | None:
        return WISH if id(param) in granted else None

    return policy


def _granted(params: Sequence[tuple[str, nn.Parameter]], num_ranks: int, max_padding_pct: float) -> set[int]:
    """Ids of the parameters whose matrices may be whole; by halving, since more wishes do not pad less."""
    matrices = sorted((param for _, param in params if param.ndim > 1), key=lambda param: param.numel())
    limit = max(max_padding_pct, _plan(params, [], num_ranks).padding_pct)
    fits, fails = 0, len(matrices) + 1
    while fails - fits > 1:
        count = (fits + fails) // 2
        if _plan(params, matrices[:count], num_ranks).padding_pct <= limit:
            fits = count
        else:
            fails = count
    return {id(param) for param in matrices[:fits]}


def _plan(params: Sequence[tuple[str, nn.Parameter]], whole: Sequence[Tensor], num_ranks: int) -> GroupPlan:
    wished = {id(param) for param in whole}
    specs = []
    for fqn, param in params:
        shape, dtype = tuple(param.shape), str(param.dtype).removeprefix("torch.")
        granularity = granularity_of(fqn, shape, WISH if id(param) in wished else None)
        specs.append(ParamSpec(fqn, shape, dtype, granularity))
    return plan_group(specs, num_ranks)
