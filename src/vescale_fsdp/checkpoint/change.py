"""What changes when a model moves from torch's fully_shard to ours, from names and shapes alone.

Both layouts are computed for the same groups. `S` is the elements that one rank keeps of a group, `m` the ranks:

    padding     torch fills every parameter up to equal rows, S = sum ceil(rows / m) * row; ours is the plan's
    copies      bytes that a rank copies beside the collectives of one step, stored and reduced in one dtype
                torch: S + mS for each gather (two, or one for the root), mS for gradients; ours: mS for gradients
    peak        without activations: 4 S of all groups (parameters, gradients, AdamW's moments), and 3 mS of the
                largest group: gathered, gathered ahead, and its gradients
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..model_plan import ModelPlan, PlannedGroup, plan_model
from ..shapes import ModelShapes
from ..spec import ParamSpec, itemsize_bits
from .calls import Finding

__all__ = ["Change", "GroupChange", "what_changes"]

VERSION = 1
"""Of the JSON report."""

STATES = 4
"""Shards of an element: itself, its gradient, and AdamW's two moments."""


@dataclass(frozen=True)
class GroupChange:
    """One group in both layouts; `count` groups are alike."""

    name: str
    count: int
    numel: int
    num_ranks: int
    nbytes_per_element: float
    torch_share: int
    our_share: int
    is_root: bool

    def share(self, whose: str) -> int:
        """Elements that one rank keeps: "torch_share" or "our_share"."""
        return {"torch_share": self.torch_share, "our_share": self.our_share}[whose]

    def padding_pct(self, share: int) -> float:
        return 100 * (self.num_ranks * share - self.numel) / self.numel if self.numel else 0.0

    @property
    def torch_copied_nbytes(self) -> int:
        gathers = 1 if self.is_root else 2
        whole = self.num_ranks * self.torch_share
        return round((gathers * (self.torch_share + whole) + whole) * self.nbytes_per_element)

    @property
    def our_copied_nbytes(self) -> int:
        return round(self.num_ranks * self.our_share * self.nbytes_per_element)


@dataclass(frozen=True)
class Change:
    """All groups, and what in the program needs a look."""

    model: str
    num_ranks: int
    groups: tuple[GroupChange, ...]
    findings: tuple[Finding, ...]

    @property
    def must_change(self) -> bool:
        return any(finding.must_change for finding in self.findings)

    def padding_pct(self, share: str) -> float:
        """Of all groups; `share` is "torch_share" or "our_share"."""
        numel = sum(group.numel * group.count for group in self.groups)
        stored = sum(group.num_ranks * group.share(share) * group.count for group in self.groups)
        return 100 * (stored - numel) / numel

    def peak_nbytes(self, share: str) -> int:
        kept = sum(group.share(share) * group.nbytes_per_element * group.count for group in self.groups)
        largest = max(group.num_ranks * group.share(share) * group.nbytes_per_element for group in self.groups)
        return round(STATES * kept + 3 * largest)

    @property
    def torch_copied_nbytes(self) -> int:
        """A step's, on one rank."""
        return sum(group.torch_copied_nbytes * group.count for group in self.groups)

    @property
    def our_copied_nbytes(self) -> int:
        return sum(group.our_copied_nbytes * group.count for group in self.groups)

    def to_json(self) -> str:
        value = {
            "version": VERSION,
            "model": self.model,
            "num_ranks": self.num_ranks,
            "padding_pct": {"torch": self.padding_pct("torch_share"), "ours": self.padding_pct("our_share")},
            "copied_nbytes_per_step": {"torch": self.torch_copied_nbytes, "ours": self.our_copied_nbytes},
            "peak_nbytes": {"torch": self.peak_nbytes("torch_share"), "ours": self.peak_nbytes("our_share")},
            "groups": [vars(group) for group in self.groups],
            "findings": [vars(finding) for finding in self.findings],
        }
        return json.dumps(value, indent=1) + "\n"


def what_changes(
    shapes: ModelShapes, num_ranks: int, findings: Sequence[Finding] = (), *, max_lanes: int | None = None
) -> Change:
    """Plan the groups of `shapes` for both engines."""
    planned: ModelPlan = plan_model(shapes, num_ranks, max_lanes=max_lanes)
    groups = tuple(_group(each, num_ranks) for each in planned.groups)
    return Change(shapes.model, num_ranks, groups, tuple(findings))


def _group(planned: PlannedGroup, num_ranks: int) -> GroupChange:
    plan = planned.plan
    return GroupChange(
        name=planned.shapes.name,
        count=planned.count,
        numel=plan.numel,
        num_ranks=num_ranks,
        nbytes_per_element=itemsize_bits(plan.dtype) / 8,
        torch_share=sum(_rows_share(spec, num_ranks) for spec in plan.specs),
        our_share=plan.share,
        is_root=planned.shapes.prefixes == ("root",),
    )


def _rows_share(spec: ParamSpec, num_ranks: int) -> int:
    """Elements of one rank where every rank holds as many rows as the fullest."""
    rows = spec.shape[0] if spec.shape else 1
    return -(-rows // num_ranks) * math.prod(spec.shape[1:])
