"""What a user may wish for: torch's own policy objects, and ParamPolicy for one parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .errors import PlanError

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "ParamPolicy"]


@dataclass(frozen=True, slots=True)
class ParamPolicy:
    """Wishes for one parameter; `fully_shard(..., param_policy=fn)` calls fn(fqn, param) -> ParamPolicy or None.

    `format` is the block format that the parameter is gathered in, `state_format` the one that its optimizer state is
    kept in, `optimizer` the name of the optimizer that will update it: names that plugins registered. `granularity` is
    a number of elements that may not be cut, or a constraint: "rows:16", "blocks:128x128", "whole". All wishes combine
    by least common multiple.
    """

    format: str | None = None
    state_format: str | None = None
    optimizer: str | None = None
    granularity: int | str | None = None

    def __post_init__(self) -> None:
        for field in ("format", "state_format", "optimizer"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                raise PlanError(f"ParamPolicy.{field} is the name of a registered plugin or None, got {value!r}")
        wish = self.granularity
        if (isinstance(wish, int) and wish < 1) or wish == "":
            raise PlanError(f"ParamPolicy.granularity is a number of elements >= 1, a constraint or None, got {wish!r}")
