"""Before the first data collective: all ranks agree on the plan, or all raise the same error.

Plans are compared among the ranks of a data mesh, which share its parameters. What one of these meshes finds, all ranks
raise: those along the axes of tensor and expert parallelism, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import _torch
from .errors import VescaleError
from .mesh import DataMesh
from .plan import Plan

__all__ = ["Circle", "DivergenceError", "Statement", "agree", "failing_together", "settle"]

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


@dataclass(frozen=True, eq=False)
class Circle:
    """The ranks of a data mesh, which say the same, and along the axes `beyond` it those that hear whether they do."""

    mesh: DataMesh
    beyond: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, mesh: DataMesh, params: Iterable[torch.Tensor]) -> Circle:
        """With the other axes that `params` are sharded on: of tensor parallelism, of experts on other data ranks."""
        beyond: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for found in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
            for axis in range(found.ndim):
                group = found.get_group(axis)
                ranks = tuple(dist.get_process_group_ranks(group))
                if not mesh.global_ranks.issuperset(ranks):
                    beyond.setdefault(ranks, group)
        return cls(mesh, tuple(beyond.values()))

    @property
    def is_silent(self) -> bool:
        """One rank, the fake backend, FakeTensorMode: there is nobody to ask."""
        alone = len(self.mesh.global_ranks) == 1 and not self.beyond
        return alone or self.mesh.backend == "fake" or _torch.in_fake_mode()


def settle(circles: Sequence[Circle], plans: Sequence[Plan]) -> None:
    """Compare each data mesh's plan among its ranks; what one of them finds, every rank raises."""
    found: DivergenceError | None = None
    for circle, plan in zip(circles, plans, strict=True):
        try:
            agree(circle, Statement(plan.to_json()))
        except DivergenceError as error:
            if circle is circles[0]:  # its ranks, and those beyond it, all know
                raise
            found = found or error
    if len(circles) > 1:
        agree(circles[0], Statement("agreed" if found is None else str(found), is_error=found is not None))
    if found is not None:
        raise found


def agree(where: Circle | DataMesh, mine: Statement) -> None:
    """Compare the statements of all ranks of a data mesh; raise what differs on all of them, and on those beyond it.

    One small all-gather per axis of the mesh, a byte per axis beyond it, and texts only if something is wrong.
    """
    circle = where if isinstance(where, Circle) else Circle(where)
    if circle.is_silent:
        return
    found: DivergenceError | None = None
    try:
        _compare(circle.mesh, mine)
    except DivergenceError as error:
        found = error
    if circle.beyond:
        found = _heard(circle, found, mine)
    if found is not None:
        raise found


def _heard(circle: Circle, found: DivergenceError | None, mine: Statement) -> DivergenceError | None:
    """What the ranks along the axes beyond found, if they did; None where all have the same error of their own."""
    text = str(found) if found is not None else mine.text if mine.is_error else None
    anything = torch.tensor([text is not None], dtype=torch.uint8, device=circle.mesh.device)
    for group in circle.beyond:
        dist.all_reduce(anything, dist.ReduceOp.MAX, group=group)
    if not anything.item():
        return None
    texts: list[str | None] = [text]
    for group in circle.beyond:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, texts, group=group)
        texts = [each for part in parts for each in part]
    if all(each == text for each in texts):  # None of its own: the ranks of the mesh have the same error, too
        return found
    return DivergenceError(next(each for each in texts if each is not None))


def _compare(mesh: DataMesh, mine: Statement) -> None:
    """Among the ranks of the mesh itself."""
    digest = torch.frombuffer(bytearray(mine.digest), dtype=torch.uint8).to(mesh.device)
    for group in mesh.axes:
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
def failing_together(circles: Sequence[Circle | DataMesh]) -> Iterator[None]:
    """An error inside is raised on every rank, here or where the others next look for it."""
    try:
        yield
    except Exception as error:
        for circle in circles:
            try:
                agree(circle, Statement(f"{type(error).__name__}: {error}", is_error=True))
            except DivergenceError as divergence:
                raise divergence from error
        raise


def _all_statements(mesh: DataMesh, mine: Statement) -> dict[int, Statement]:
    """By global rank."""
    known: dict[int, Statement] = {dist.get_rank(): mine}
    for group in mesh.axes:
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
