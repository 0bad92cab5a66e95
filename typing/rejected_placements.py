"""Wrong uses of placements that mypy refuses: an unused ignore here means that a wrong use passes."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from ragged_dtensor import RaggedShard, StridedRaggedShard, Units, distribute_tensor, from_local

RaggedShard(0, (1, 2))  # type: ignore[arg-type]
RaggedShard((0,), 3)  # type: ignore[arg-type]
RaggedShard((0,), (1.5, 2.0))  # type: ignore[arg-type]
RaggedShard((0,))  # type: ignore[call-arg]
StridedRaggedShard((0,), (1, 2))  # type: ignore[call-arg]
Units.from_runs((1, 2))  # type: ignore[arg-type]


def misuse(x: torch.Tensor, mesh: DeviceMesh) -> None:
    placement = RaggedShard((0,), (1, 2))
    placement.dims = (0, 1)  # type: ignore[misc]
    distribute_tensor(x, mesh, placement)  # type: ignore[arg-type]
    from_local(x, mesh, [placement], (4, 3))  # type: ignore[call-arg]
    from_local(x, mesh, [placement], shape=4)  # type: ignore[arg-type]
