"""How many bytes a rank holds of one group, by role.

Counted is what the runtime and autograd hold for parameters: shards, gathered parameters, gradients, buffers of
collectives. Not counted: activations, optimizer states, what a block format's encoding takes for a moment, and what a
collective's backend allocates inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gloo_comms import ExchangeReduceScatter
from .group.encoded_group import EncodedGroup
from .group.extension_group import ExtensionGroup
from .group.gradients import portion_nbytes
from .group.param_group import ParamGroup

__all__ = ["GroupFootprint", "footprint_of_group"]


@dataclass(frozen=True)
class GroupFootprint:
    """One group's bytes on a rank, by role; a role that the group does not need is 0."""

    shard: int
    whole: int
    """Gathered parameters."""
    wire: int
    """What else exists while it is gathered: a block format's planes, memory of a custom collective."""
    kept: int
    """Between forward and backward, where `reshard_after_forward` is a number."""
    grads: tuple[int, ...]
    """Autograd's gradient of each gathered parameter."""
    doubled_grads: int
    """Of parameters in several places, whose gradients exist twice for a moment."""
    portion: int
    """The reduction's input, or the largest portion of it."""
    num_portions: int
    num_at_once: int
    """Portions that exist together: on a device, reductions go on while the next layer computes."""
    reduced: int
    """The result of the reduction in its dtype, where the stored gradient is another tensor."""
    stored_grads: int

    @property
    def peak(self) -> int:
        """The most that this group holds at once, in any schedule."""
        grads, result = sum(self.grads), max(self.reduced, self.stored_grads)
        moments = (
            self.whole + max(self.wire, self.kept),
            self.whole + grads + self.doubled_grads,
            grads + self.portion,
            grads + self.num_at_once * self.portion + result if self.num_portions > 1 else 0,
            self.portion + self.reduced + self.stored_grads,
        )
        return self.shard + max(moments)


def footprint_of_group(group: ParamGroup) -> GroupFootprint | None:
    """None for tensor subclasses that gather themselves: only they know what they allocate."""
    if isinstance(group, ExtensionGroup):
        return None
    shards, num_ranks, views = group.shards, group.mesh.num_ranks, group.views_shard
    share = shards.buffer.flat.numel()
    reduce_dtype, num_portions = group.reduce_dtype, group.num_portions
    alone = views and reduce_dtype == group.compute_dtype and group.mesh.num_replicas == 1
    numels, twice = _trainable_numels(group)
    on_device = not shards.is_offloaded or group.device.type == "cpu"
    whole = 0 if views else num_ranks * share * group.compute_dtype.itemsize
    portion = portion_nbytes(group.plan.layout, reduce_dtype, num_portions) if any(numels) and not alone else 0
    stored = share * shards.dtype.itemsize if portion else 0
    is_cast = reduce_dtype != shards.dtype or not on_device
    comm = group.reduction.comm
    staged = 1 if comm is None or getattr(comm, "is_in_place", False) else 2
    return GroupFootprint(
        shard=shards.nbytes if on_device else 0,
        whole=_handed_nbytes(group) or whole,
        wire=_wire_nbytes(group, whole),
        kept=_kept_numel(group, share) * group.compute_dtype.itemsize,
        grads=tuple(numel * group.compute_dtype.itemsize for numel in numels),
        doubled_grads=twice * group.compute_dtype.itemsize,
        portion=(2 if isinstance(comm, ExchangeReduceScatter) else staged) * portion,
        num_portions=num_portions,
        num_at_once=num_portions if group.device.type not in ("cpu", "meta") else 1,
        reduced=share * reduce_dtype.itemsize * staged if stored and (is_cast or staged > 1) else 0,
        stored_grads=stored if on_device else 0,
    )


def _trainable_numels(group: ParamGroup) -> tuple[list[int], int]:
    """Elements of each parameter, 0 if it is frozen, and of all that train and are in several places."""
    managed, numels = group.shards.managed, group.shards.numels
    trained = [numel if each.param.requires_grad else 0 for each, numel in zip(managed, numels, strict=True)]
    return trained, sum(numel for each, numel in zip(managed, trained, strict=True) if len(each.owners) > 1)


def _handed_nbytes(group: ParamGroup) -> int:
    """Of gathered codes and scales that modules compute with instead of decoded parameters."""
    if not isinstance(group, EncodedGroup) or not group.is_handed or group.quantized is None:
        return 0
    planes = group.quantized.planes
    blocks = sum(tiling.num_blocks for tiling in planes.tilings)
    return group.mesh.num_ranks * planes.wire_nbytes + blocks * planes.scale_nbytes


def _wire_nbytes(group: ParamGroup, whole: int) -> int:
    if group.quantized is not None:
        if _handed_nbytes(group) and group.all_gather_comm is None:
            return 0  # gathered where they stay
        return group.mesh.num_ranks * group.quantized.planes.wire_nbytes
    return whole if group.all_gather_comm is not None else 0


def _kept_numel(group: ParamGroup, share: int) -> int:
    if isinstance(group.reshard_after_forward, bool):
        return 0
    return group.mesh.num_ranks // group.reshard_after_forward * share
