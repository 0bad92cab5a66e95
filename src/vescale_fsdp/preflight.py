"""Before the first data collective: all ranks agree on the plan, or all raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import _torch
from .errors import VescaleError
from .mesh import DataMesh
from .plan import Plan

__all__ = ["DivergenceError", "Statement", "agree", "failing_together"]

DIGEST_NBYTES = 32


class DivergenceError(VescaleError):
    """Ranks do not wrap the same model in the same way; every rank raises this with the same text."""


@dataclass(frozen=True)
class Statement:
    """What one rank says: the plan it made, or the error that kept it from making one."""

    text: str
    is_error: bool = False

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.is_error}{self.text}".encode()).digest()


def agree(mesh: DataMesh, mine: Statement) -> None:
    """Compare the statements of all ranks of `mesh`: one small all-gather per axis, and the texts only if they differ.

    Nothing happens for one rank, on the fake backend, and under FakeTensorMode.
    """
    if mesh.num_ranks * mesh.num_replicas == 1 or mesh.backend == "fake" or _torch.in_fake_mode():
        return
    digest = torch.frombuffer(bytearray(mine.digest), dtype=torch.uint8).to(mesh.device)
    for group in _axes(mesh):
        size = dist.get_world_size(group)
        gathered = torch.empty(size * digest.numel(), dtype=torch.uint8, device=mesh.device)
        _torch.all_gather(gathered, digest, group=group)
        digest = gathered
    if not mine.is_error and bool((digest.view(-1, DIGEST_NBYTES) == digest[:DIGEST_NBYTES]).all()):
        return
    texts = _all_statements(mesh, mine)
    if not (mine.is_error and all(each == mine for each in texts.values())):
        raise DivergenceError(_difference(texts))


@contextmanager
def failing_together(meshes: Sequence[DataMesh]) -> Iterator[None]:
    """An error inside is raised on every rank, here or where the others next look for it."""
    try:
        yield
    except Exception as error:
        for mesh in meshes:
            try:
                agree(mesh, Statement(f"{type(error).__name__}: {error}", is_error=True))
            except DivergenceError as divergence:
                raise divergence from error
        raise


def _axes(mesh: DataMesh) -> list[dist.ProcessGroup]:
    return [mesh.group] if mesh.replicate_group is None else [mesh.group, mesh.replicate_group]


def _all_statements(mesh: DataMesh, mine: Statement) -> dict[int, Statement]:
    """By global rank."""
    known: dict[int, Statement] = {dist.get_rank(): mine}
    for group in _axes(mesh):
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, known, group=group)
        known = {rank: statement for part in parts for rank, statement in part.items()}
    return dict(sorted(known.items()))


def _difference(texts: dict[int, Statement]) -> str:
    errors = {rank: each.text for rank, each in texts.items() if each.is_error}
    if errors:
        first = min(errors)
        same = [rank for rank, text in errors.items() if text == errors[first]]
        return f"{_ranks(same)} of {len(texts)}: {errors[first]}"
    first, *rest = texts
    others = [rank for rank in rest if texts[rank] != texts[first]]
    lines = Plan.from_json(texts[others[0]].text).diff(Plan.from_json(texts[first].text))
    return (
        f"{_ranks(others)} wrapped another model than rank {first}; the first difference ({others[0]} != {first}): "
        f"{lines[0] if lines else 'order of groups'}. Build and wrap the same model on every rank."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
