"""Replicas of a model (HSDP) start equal: digests of their shards are compared before the first forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import _torch
from .formats.encoded import EncodedTensor
from .group.param_group import ParamGroup
from .mesh import DataMesh
from .preflight import Circle, DivergenceError, Statement, agree

__all__ = ["check_replicas", "copy_to_replicas", "digest"]

CHUNK = 1 << 20
"""Elements that are weighted at once: what the digest needs in memory beside the shard."""

FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that no position's weight loses bits; the golden ratio's digits, so that neighbours' are far apart."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(groups: Sequence[ParamGroup], circles: Sequence[Circle]) -> None:
    """Raise on every rank, naming a parameter, if replicas differ in any bit of the weights that they train from."""
    found: list[str] = []
    compared = _by_replicas(groups)
    for mesh, members in compared:
        mine = torch.stack([digest(local).to(mesh.device) for _, local in members])
        theirs = mine.new_empty(mesh.num_replicas * mine.numel())
        _torch.all_gather(theirs, mine.view(-1), group=mesh.replicate_group)
        found += _differing([fqn for fqn, _ in members], theirs.view(mesh.num_replicas, *mine.shape))
    if not compared:
        return
    text = _offer(found) if found else "equal"
    agree(circles[0], Statement(text, is_error=bool(found)))
    if found:
        raise DivergenceError(text)


def _by_replicas(groups: Sequence[ParamGroup]) -> list[tuple[DataMesh, list[tuple[str, torch.Tensor]]]]:
    """Names and shards that one process group of replicas holds; subclasses that gather themselves are left out."""
    found: dict[int, tuple[DataMesh, list[tuple[str, torch.Tensor]]]] = {}
    for group in groups:
        silent = group.mesh.num_replicas == 1 or group.shards.held.is_meta or Circle(group.mesh).is_silent
        if not silent:
            _, members = found.setdefault(id(group.mesh.replicate_group), (group.mesh, []))
            locals_ = zip(group.fqns, group.shards.locals, strict=True)
            members += [(fqn, part) for fqn, local in locals_ for part in _parts(local)]
    return list(found.values())


def _parts(local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (local.payload, local.scales) if isinstance(local, EncodedTensor) else (local,)


def _differing(fqns: Sequence[str], digests: torch.Tensor) -> list[str]:
    """Names of tensors whose digests, (replicas, tensors, 2), are not the same in all replicas."""
    equal = (digests == digests[:1]).all(dim=2).all(dim=0)
    return list(dict.fromkeys(fqn for fqn, same in zip(fqns, equal.tolist(), strict=True) if not same))


def _offer(fqns: Sequence[str]) -> str:
    more = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
    return (
        f"replicas start from different weights, and would stay apart: {fqns[0]}{more}. Call "
        f"vescale_fsdp.broadcast_replicas(model) after initialising it, or give every replica the same seed."
    )


def copy_to_replicas(group: ParamGroup, source: int) -> None:
    """Give every replica the shards of replica `source`."""
    if group.mesh.replicate_group is not None and group.mesh.num_replicas > 1:
        dist.broadcast(group.shards.held, group_src=source, group=group.mesh.replicate_group)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two whole numbers: the sum of the elements' bits, and the sum weighted by position, both modulo 2**64.

    Computed where the tensor is. Equal tensors have equal digests; a change of any one bit changes both.
    """
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(BITS.get(flat.itemsize, torch.uint8))
    plain = weighted = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device) * 2 + 1
        plain = plain + part.sum()
        weighted = weighted + (part * (weights * FACTOR)).sum()
    return torch.stack([plain, weighted])
