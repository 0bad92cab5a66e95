"""Wrong uses of meshes that mypy --strict finds; an ignore that nothing needs is an error itself."""

from torch import nn

from vescale_fsdp import DataParallelMeshDims, broadcast_replicas, clip_grad_norm_, fully_shard

layer = nn.Linear(4, 4)

fully_shard(layer, dp_mesh_dims="dp")  # type: ignore[call-overload]
fully_shard(layer, mesh=(2, 2))  # type: ignore[call-overload]
fully_shard(layer, shard_placement_fn="dp")  # type: ignore[call-overload]
DataParallelMeshDims(shard=0)  # type: ignore[arg-type]
broadcast_replicas(layer.weight)  # type: ignore[arg-type]
broadcast_replicas(layer, source="first")  # type: ignore[arg-type]
clip_grad_norm_(layer, 1.0)  # type: ignore[arg-type]
