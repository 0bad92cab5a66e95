"""The ranks that share one group's parameters: a mesh with a shard axis and, for HSDP, a replicate axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import Placement, Replicate

from . import _torch
from .errors import VescaleError

__all__ = ["DataMesh", "NamedAxes", "default_mesh"]


@dataclass(frozen=True, eq=False)
class NamedAxes:
    """A mesh of all parallelisms, on which parameters are DTensors already, and the names of its data axes."""

    mesh: DeviceMesh
    dims: DataParallelMeshDims

    def __post_init__(self) -> None:
        if self.mesh.mesh_dim_names is None:
            raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        for name in (*self.dims.shard_names, *self.dims.replicate_names):
            if name not in self.mesh.mesh_dim_names:
                raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {self.mesh.mesh_dim_names}")

    @property
    def names(self) -> tuple[str, ...]:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names

    @property
    def shard_axes(self) -> tuple[int, ...]:
        return tuple(self.names.index(name) for name in self.dims.shard_names)

    @property
    def replicate_axes(self) -> tuple[int, ...]:
        return tuple(self.names.index(name) for name in self.dims.replicate_names)

    def flattened(
        self, data: DataMesh, placements: tuple[Placement, ...]
    ) -> tuple[DeviceMesh, tuple[Placement, ...], int]:
        """The mesh with one axis for all data axes that shard, placements on it, and where that axis is.

        It stands where the first of them stood, behind that of the replicas: (cp, dp, tp) becomes (dp_cp, tp).
        """
        meshes: list[DeviceMesh] = []
        around: list[Placement] = []
        first = min(self.shard_axes)
        axis_of_shards = 0
        for axis, name in enumerate(self.names):
            if axis == first:
                axis_of_shards = len(around) + data.mesh.ndim - 1
                meshes.append(data.mesh)
                around += [Replicate()] * data.mesh.ndim
            elif axis not in (*self.shard_axes, *self.replicate_axes):
                meshes.append(self.mesh[name])
                around.append(placements[axis])
        return _torch.concatenated(meshes), tuple(around), axis_of_shards


@dataclass(frozen=True, eq=False)
class DataMesh:
    """Parameters are cut over `shard_axis` of `mesh` and equal along `replicate_axis`.

    No shard axis means that every rank keeps all of them (DDP). `num_contributions`: how many ranks' data a summed
    gradient holds, if that is not the size of the mesh: experts on fewer data ranks than the rest of the model see the
    tokens of all.
    """

    mesh: DeviceMesh
    shard_axis: int | None = 0
    replicate_axis: int | None = None
    spmd: NamedAxes | None = None
    num_contributions: int | None = None
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataMesh:
        """A 1-D mesh shards; a 2-D mesh replicates over its first axis and shards over its second (HSDP).

        With `dims`, `mesh` is that of all parallelisms, and they name its data axes; several names become one axis.
        """
        if dims is not None:
            return cls._named(NamedAxes(mesh, dims))
        if mesh.ndim == 1:
            return cls(mesh)
        if mesh.ndim == 2:
            if mesh.mesh_dim_names is None:
                raise VescaleError("a 2-D mesh for HSDP needs axis names: pass mesh_dim_names to init_device_mesh")
            return cls(mesh, shard_axis=1, replicate_axis=0)
        raise VescaleError(f"fully_shard expects a 1-D or 2-D mesh, got {mesh.ndim} axes: {mesh}. Use dp_mesh_dims.")

    @classmethod
    def _named(cls, axes: NamedAxes) -> DataMesh:
        shard, replicate = (
            _torch.flattened(axes.mesh, names) if names else None
            for names in (axes.dims.shard_names, axes.dims.replicate_names)
        )
        if shard is None:
            assert replicate is not None  # DataParallelMeshDims has one of the two
            return cls(replicate, shard_axis=None, replicate_axis=0, spmd=axes)
        if replicate is None:
            return cls(shard, spmd=axes)
        return cls(_torch.concatenated([replicate, shard]), shard_axis=1, replicate_axis=0, spmd=axes)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        axis = self.shard_axis if self.shard_axis is not None else self.replicate_axis
        assert axis is not None
        return self.mesh.get_group(axis)

    @cached_property
    def num_ranks(self) -> int:
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @cached_property
    def rank(self) -> int:
        return 0 if self.shard_axis is None else self.mesh.get_local_rank(self.shard_axis)

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @cached_property
    def num_replicas(self) -> int:
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @cached_property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """The process group along each of its axes: shards, then replicas."""
        shard = () if self.shard_axis is None else (self.mesh.get_group(self.shard_axis),)
        return shard if self.replicate_group is None else (*shard, self.replicate_group)

    @cached_property
    def global_ranks(self) -> frozenset[int]:
        if self.mesh.ndim == 1:  # the tensor of ranks cannot be read under FakeTensorMode
            return frozenset(dist.get_process_group_ranks(self.mesh.get_group()))
        return frozenset(self.mesh.mesh.flatten().tolist())

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
        if self.mesh.ndim == 1 or names is None or self.shard_axis is None:
            return self.mesh
        return self.mesh[names[self.shard_axis]]

    def joined(self, other: DeviceMesh) -> DeviceMesh:
        """The axes of this mesh, then those of `other`, which is part of the same root mesh."""
        if other not in self._joined:
            self._joined[other] = _torch.concatenated([self.mesh, other])
        return self._joined[other]

    def regrouped(self, num_ranks: int) -> DataMesh:
        """Neighbours in groups of `num_ranks`, over which parameters are kept between forward and backward."""
        known = self.mesh.__dict__.setdefault("_vescale_regrouped", {})  # on the mesh: groups live as long as it does
        if num_ranks not in known:
            if len(self.global_ranks) == dist.get_world_size():
                regrouped = DeviceMesh(self.mesh.device_type, self.mesh.mesh.view(-1, num_ranks))
            else:  # the other axes' ranks make their groups at the same time
                regrouped = _torch.regrouped(self.shard_mesh, num_ranks)
            known[num_ranks] = DataMesh(regrouped, shard_axis=1, replicate_axis=0)
        found: DataMesh = known[num_ranks]
        return found


def default_mesh() -> DeviceMesh:
    """All ranks in one axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    # Whether it is there: a build for CUDA names one on any machine.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
