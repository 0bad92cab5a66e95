"""Several root modules that share their device streams, as the stages of a pipeline do."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .module import FSDPModule

__all__ = ["share_comm_ctx"]


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """Let all `modules` gather and reduce in the streams of the first, which keeps memory in fewer pools."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard wrapped, got {module}")
    schedules = [module._get_fsdp_state().schedule for module in modules if isinstance(module, FSDPModule)]
    for schedule in schedules[1:]:
        schedule.streams = schedules[0].streams
        for state in schedule.states:
            for group in state.groups:
                group.streams = schedule.streams
