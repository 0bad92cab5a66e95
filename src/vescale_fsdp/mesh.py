"""The ranks that share one group's parameters: a mesh with a shard axis and, for HSDP, a replicate axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from .errors import VescaleError

__all__ = ["DataMesh", "default_mesh"]


@dataclass(frozen=True, eq=False)
class DataMesh:
    """Parameters are cut over `shard_axis` of `mesh` and equal along `replicate_axis`."""

    mesh: DeviceMesh
    shard_axis: int = 0
    replicate_axis: int | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> DataMesh:
        """A 1-D mesh shards; a 2-D mesh replicates over its first axis and shards over its second (HSDP)."""
        if mesh.ndim == 1:
            return cls(mesh)
        if mesh.ndim == 2:
            if mesh.mesh_dim_names is None:
                raise VescaleError("a 2-D mesh for HSDP needs axis names: pass mesh_dim_names to init_device_mesh")
            return cls(mesh, shard_axis=1, replicate_axis=0)
        raise VescaleError(f"fully_shard expects a 1-D or 2-D mesh, got {mesh.ndim} axes: {mesh}. Use dp_mesh_dims.")

    @cached_property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.shard_axis)

    @cached_property
    def num_ranks(self) -> int:
        return self.mesh.size(self.shard_axis)

    @cached_property
    def rank(self) -> int:
        return self.mesh.get_local_rank(self.shard_axis)

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @cached_property
    def num_replicas(self) -> int:
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @cached_property
    def backend(self) -> str:
        return str(dist.get_backend(self.group))

    @cached_property
    def device(self) -> torch.device:
        """Where parameters live: the current device of the mesh's kind."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis alone."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[self.shard_axis]]

    def regrouped(self, num_ranks: int) -> DataMesh:
        """Neighbours in groups of `num_ranks`, over which parameters are kept between forward and backward."""
        known = self.mesh.__dict__.setdefault("_vescale_regrouped", {})  # on the mesh: groups live as long as it does
        if num_ranks not in known:
            regrouped = DeviceMesh(self.mesh.device_type, self.mesh.mesh.view(-1, num_ranks))
            known[num_ranks] = DataMesh(regrouped, shard_axis=1, replicate_axis=0)
        found: DataMesh = known[num_ranks]
        return found

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """`shard` on the shard axis, replicated on every other axis."""
        return tuple(shard if axis == self.shard_axis else Replicate() for axis in range(self.mesh.ndim))


def default_mesh() -> DeviceMesh:
    """All ranks in one axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
