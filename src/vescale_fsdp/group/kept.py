"""What a rank keeps of one group between forward and backward when `reshard_after_forward` is a number of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from .. import _torch
from ..home import local_shape, ragged_shard
from ..layout import LanePlan
from ..mesh import DataMesh
from .buffer import DBuffer
from .shards import Shards

__all__ = ["KeptShards"]


class KeptShards:
    """A shard over fewer ranks: each keeps several neighbouring shares of the whole, in the compute dtype.

    Of 4 ranks' shares |0|1|2|3|, with 2 ranks: ranks 0 and 2 keep |0|1|, ranks 1 and 3 keep |2|3|, and backward gathers
    among ranks 0, 1 and among ranks 2, 3. A block that was not cut between 4 ranks is not cut between 2.
    """

    def __init__(self, shards: Shards, mesh: DataMesh, num_ranks: int, whole: DBuffer) -> None:
        self.mesh = mesh.regrouped(num_ranks)
        factor = mesh.num_ranks // num_ranks
        lanes = tuple(LanePlan(factor * lane.share, factor * lane.bound) for lane in shards.layout.lanes)
        layout = replace(shards.layout, num_ranks=num_ranks, lanes=lanes)
        dtype, device = whole.dtype, whole.flat.device
        self.buffer = DBuffer.shard(layout, shards.numels, self.mesh.rank, dtype=dtype, device=device)
        with torch.no_grad():
            for kept, lane in zip(self.buffer.lanes, whole.lanes, strict=True):
                kept.copy_(lane.narrow(0, self.mesh.rank * kept.numel(), kept.numel()))
        self.params = []
        for i, param in enumerate(shards.params):
            if shards.homes[i].given is not None:  # what another parallelism cut shows its shard
                self.params.append(param)
                continue
            placement = ragged_shard(layout, i, tuple(param.shape))
            local = self.buffer.view(i).view(local_shape(placement, param.shape, len(self.buffer.pieces[i])))
            spec = _torch.dtensor_spec(self.mesh.mesh, (Replicate(), placement), param)
            tensor = _torch.dtensor(local, _torch.with_dtype(spec, dtype))
            self.params.append(nn.Parameter(tensor, requires_grad=param.requires_grad))
