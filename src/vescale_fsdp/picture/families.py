"""Which tensors share a colour: those whose names differ only in numbers; small ones that are left over are grey."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..plan import GroupPlan, TensorPlan
from .style import GREY, PALETTE

__all__ = ["Family", "families_of"]


@dataclass(frozen=True)
class Family:
    """Tensors of one colour, in the order of their lanes and places; their names start after `prefix`."""

    name: str
    tensors: tuple[TensorPlan, ...]
    colour: str
    prefix: str

    def short_name(self, tensor: TensorPlan) -> str:
        return tensor.spec.fqn.removeprefix(self.prefix)

    @property
    def numel(self) -> int:
        return sum(tensor.spec.numel for tensor in self.tensors)

    @property
    def label(self) -> str:
        name = self.name if len(self.name) <= 32 else "..." + self.name[-29:]
        return f"{name} (x{len(self.tensors)})" if len(self.tensors) > 1 else name


def families_of(plan: GroupPlan, prefix: str) -> list[Family]:
    """Largest first; what the palette has no colour for is one grey family. Names start after the module `prefix`."""
    members: dict[str, list[TensorPlan]] = {}
    for tensor in sorted(plan.tensors, key=lambda tensor: (tensor.lane, tensor.start)):
        if tensor.spec.numel:
            name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", tensor.spec.fqn.removeprefix(prefix + "."))
            members.setdefault(name, []).append(tensor)
    ranked = sorted(members.items(), key=lambda item: -sum(tensor.spec.numel for tensor in item[1]))
    named = len(PALETTE) if len(ranked) <= len(PALETTE) else len(PALETTE) - 1
    families = [
        Family(name, tuple(tensors), PALETTE[at], prefix + ".") for at, (name, tensors) in enumerate(ranked[:named])
    ]
    if rest := [tensor for _, tensors in ranked[named:] for tensor in tensors]:
        families.append(Family("other", tuple(rest), GREY, prefix + "."))
    return families
