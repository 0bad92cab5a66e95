"""fully_shard on RaggedShard DTensors: torch's API, buffers that are gathered and reduced in place, planned layouts.

Reading order; a file imports only what stands before it:

    errors _torch fsdp2_seams nested policy spec layout formats hookspecs constraints plugins plan planner testing
    shapes wishes model_plan advisor picture simulate mesh gloo_comms home preflight managed guards group grouping
    replicas first_use schedule state fused_gradients caching_allocator footprint step_memory module forward_method
    comm_context broadcast ema fully_shard grad_clip optim checkpoint report demo cli

Importing changes nothing in torch.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from .broadcast import broadcast_replicas
from .checkpoint import (
    CheckpointError,
    export_safetensors,
    from_fsdp2,
    import_safetensors,
    iterate_tensors,
    load,
    load_full_state,
    save,
    to_fsdp2,
    transfer_state,
)
from .comm_context import share_comm_ctx
from .ema import ShardedEMA
from .errors import VescaleError
from .formats.block_format import BlockFormat
from .forward_method import register_fsdp_forward_method
from .fully_shard import fully_shard
from .fused_gradients import FusedGradients, fuse_gradient_accumulation
from .gloo_comms import ExchangeReduceScatter, InPlaceReduceScatter
from .grad_clip import clip_grad_norm_
from .hookspecs import hookimpl
from .module import FSDPModule, UnshardHandle
from .policy import ParamPolicy
from .report import explain, report, traffic

__all__ = [
    "BlockFormat",
    "CPUOffloadPolicy",
    "CheckpointError",
    "DataParallelMeshDims",
    "ExchangeReduceScatter",
    "FSDPModule",
    "FusedGradients",
    "InPlaceReduceScatter",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamPolicy",
    "ShardedEMA",
    "UnshardHandle",
    "VescaleError",
    "broadcast_replicas",
    "clip_grad_norm_",
    "explain",
    "export_safetensors",
    "from_fsdp2",
    "fully_shard",
    "fuse_gradient_accumulation",
    "hookimpl",
    "import_safetensors",
    "iterate_tensors",
    "load",
    "load_full_state",
    "register_fsdp_forward_method",
    "report",
    "save",
    "share_comm_ctx",
    "to_fsdp2",
    "traffic",
    "transfer_state",
]
