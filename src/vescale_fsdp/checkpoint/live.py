"""State that moves between live models without a file: from one engine or plan to another, and out in buckets.

    source = torch's fully_shard, Shard(0)      --transfer_state-->   target = ours, RaggedShard, or the reverse

Every tensor goes straight from one cut to the other: no rank ever holds a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate

from .contents import aliases_of, fresh_slots, state_of, with_aliases
from .errors import CheckpointError, together

__all__ = ["iterate_tensors", "transfer_state"]

BUCKET_NBYTES = 1 << 28
MAX_NAMED = 10


@torch.no_grad()
def transfer_state(
    source: nn.Module,
    target: nn.Module,
    source_optimizer: torch.optim.Optimizer | None = None,
    target_optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Give `target` the values of `source`, and its optimizer the other's state; every rank calls it.

    The two models are the same but for how they are sharded: by ours, by torch's fully_shard, or not at all, over the
    same mesh. The target's optimizer may be fresh. One tensor is on its way at a time.

    Raises CheckpointError, on all ranks alike and before anything changes, with the names and shapes that differ.
    """
    if (source_optimizer is None) != (target_optimizer is None):
        raise CheckpointError("expected an optimizer of both models or of neither")
    given = state_of(source, source_optimizer)
    with fresh_slots(target_optimizer):
        wanted = state_of(target, target_optimizer)
        slots = given.get("optimizer", {}).get("state", {})
        for fqn in [fqn for fqn in wanted.get("optimizer", {}).get("state", {}) if fqn not in slots]:
            del wanted["optimizer"]["state"][fqn]
        sources, targets = _tensors(given), _tensors(wanted)
        together(lambda: _check(sources, targets))
        for name, tensor in targets.items():
            _move(sources[name], tensor)
        # What views no parameter, as the values of shards that are stored as codes, arrives only now.
        target.load_state_dict(with_aliases(target, wanted["model"]), strict=False)
        if target_optimizer is not None:
            loaded = {"state": wanted["optimizer"]["state"], "param_groups": given["optimizer"]["param_groups"]}
            options = StateDictOptions(strict=False)  # parameters without slots are not missing
            set_optimizer_state_dict(target, target_optimizer, loaded, options=options)


def _tensors(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor below `state`, by the path of its keys."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            found |= _tensors(value, f"{prefix}{key}.")
    return found


def _check(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    lines = [f"{name}: not in the target" for name in sources if name not in targets]
    for name, target in targets.items():
        source = sources.get(name)
        if source is None:
            lines.append(f"{name}: not in the source")
        elif source.shape != target.shape:
            lines.append(f"{name}: source {tuple(source.shape)}, target {tuple(target.shape)}")
        elif source.is_meta or target.is_meta:
            lines.append(f"{name}: on the meta device; call to_empty(device=...) first")
        elif isinstance(source, DTensor) and isinstance(target, DTensor) and source.device_mesh != target.device_mesh:
            lines.append(f"{name}: source on {source.device_mesh}, target on {target.device_mesh}; use one mesh")
    if lines:
        more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
        raise CheckpointError("\n".join(["source and target differ:", *lines[:MAX_NAMED], *more]))


def _move(source: torch.Tensor, target: torch.Tensor) -> None:
    match source, target:
        case DTensor(), DTensor():
            target.copy_(source.redistribute(placements=target.placements))
        case DTensor(), _:
            target.copy_(source.full_tensor())  # the target is whole itself
        case _, DTensor():
            target.copy_(_as_replica(source, target).redistribute(placements=target.placements))
        case _:
            target.copy_(source)


def _as_replica(source: torch.Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(source, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def iterate_tensors(
    model: nn.Module, *, whole: bool = True, bucket_nbytes: int = BUCKET_NBYTES, dtype: torch.dtype | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """The model's state in buckets {fqn: tensor}, for handing weights to another program; every rank iterates.

    Whole tensors are gathered bucket by bucket, never the model. With whole=False the sharded DTensors come, and
    nothing is sent. Tied parameters come once, under their first name; buffers come too.

    bucket_nbytes: of a bucket at most, unless one tensor is larger.
    dtype: of floating-point tensors; None keeps their own.
    """
    if bucket_nbytes < 1:
        raise CheckpointError(f"bucket_nbytes: expected at least 1, got {bucket_nbytes}")
    aliases = aliases_of(model)
    bucket: dict[str, torch.Tensor] = {}
    nbytes = 0
    for fqn, value in model.state_dict().items():
        if fqn in aliases or not isinstance(value, torch.Tensor):
            continue
        target = dtype if dtype is not None and value.is_floating_point() else value.dtype
        size = value.numel() * target.itemsize
        if bucket and nbytes + size > bucket_nbytes:
            yield bucket
            bucket, nbytes = {}, 0
        cast = value.to(target)  # before the gather, which then moves fewer bytes
        bucket[fqn] = cast.full_tensor() if whole and isinstance(cast, DTensor) else cast
        nbytes += size
    if bucket:
        yield bucket
