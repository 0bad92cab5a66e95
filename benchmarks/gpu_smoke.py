"""What one accelerator shows in five minutes: copies, allocator, step time against FSDP2, on a model of 1.3 x 10^9.

    python benchmarks/gpu_smoke.py                one rank of NCCL
    python benchmarks/gpu_smoke.py --ranks 8      rank 0 of 8 whose collectives do nothing: sizes as there, losses void

Checks, each printed as ok or FAILED: losses equal FSDP2's (one rank); gathered parameters of a group are views of one
storage; nothing is copied around a gather but the cast; no tensor is handed to `record_stream`; the allocator reserves
no more than for FSDP2, and no more after ten steps than after two. Then both engines step in turns. Exit code 1 if a
check failed, 2 without a device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from engine_models import ENGINES, Policy, Size, build, text
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp import FSDPModule, traffic

MODEL = Size(layers=24, width=2048, heads=16, hidden=8192, vocabulary=32000, length=512)
POLICY = Policy("bf16")
GIB = 2**30
OURS, PEER = "ours, flat", "fsdp2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="1: NCCL; more: a group that moves nothing")
    parser.add_argument("--layers", type=int, default=MODEL.layers, help="fewer for a small device")
    parser.add_argument("--texts", type=int, default=4, help="texts of 512 tokens per step")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_smoke needs a CUDA device, and there is none here. CPU ranks: benchmarks/step.py", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        mesh = _mesh(options.ranks, folder)
        smoke = Smoke(mesh, options)
        for check in (smoke.memory, smoke.copies, smoke.losses):
            check()
        smoke.times()
        dist.destroy_process_group()
    return 1 if smoke.failed else 0


def _mesh(num_ranks: int, folder: str) -> DeviceMesh:
    torch.cuda.set_device(0)
    if num_ranks == 1:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    return init_device_mesh("cuda", (num_ranks,))


class Smoke:
    """The checks, in an order in which one engine's memory is gone before the other's is counted."""

    def __init__(self, mesh: DeviceMesh, options: argparse.Namespace) -> None:
        self.mesh, self.options = mesh, options
        self.size = Size(**{**vars(MODEL), "layers": options.layers})
        self.failed: list[str] = []
        self._losses: dict[str, list[float]] = {}

    def check(self, is_good: bool, claim: str) -> None:
        print(f"{'ok    ' if is_good else 'FAILED'}  {claim}", flush=True)
        if not is_good:
            self.failed.append(claim)

    def wrap(self, name: str) -> tuple[Any, Any]:
        return ENGINES[name](build(self.size, "cuda"), self.mesh, POLICY)

    def step(self, module: Any, optimizer: Any, number: int) -> Tensor:
        loss: Tensor = module(text(self.size, number, 0, self.options.texts).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def memory(self) -> None:
        """Reserved and allocated peaks of each engine alone."""
        reserved = {}
        for name in (PEER, OURS):
            gc.collect()
            torch.cuda.empty_cache()
            module, optimizer = self.wrap(name)
            torch.cuda.reset_peak_memory_stats()
            losses = [self.step(module, optimizer, number) for number in range(2)]
            early = torch.cuda.max_memory_reserved()
            losses += [self.step(module, optimizer, number) for number in range(2, 10)]
            reserved[name] = torch.cuda.max_memory_reserved()
            self._losses[name] = [loss.item() for loss in losses]
            allocated = torch.cuda.max_memory_allocated()
            print(f"{name:<12} reserved {reserved[name] / GIB:.2f} GiB, allocated {allocated / GIB:.2f} GiB")
            if name == OURS:
                self.check(reserved[name] == early, "the allocator reserves nothing after the second step")
            del module, optimizer
        self.check(reserved[OURS] <= reserved[PEER], f"reserved {reserved[OURS] / reserved[PEER]:.3f} of FSDP2's")

    def copies(self) -> None:
        """One storage per group, the cast alone around a gather, no record_stream."""
        module, optimizer = self.wrap(OURS)
        self.step(module, optimizer, 0)
        marked = 0
        original = torch.Tensor.record_stream

        def record_stream(tensor: Tensor, stream: Any) -> None:
            nonlocal marked
            marked += 1
            original(tensor, stream)

        before = traffic(module)
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign,assignment]
        try:
            self.step(module, optimizer, 1)
        finally:
            torch.Tensor.record_stream = original  # type: ignore[method-assign]
        moved = traffic(module) - before
        self.check(marked == 0, f"record_stream is called for {marked} tensors")
        block = module.blocks[0]
        assert isinstance(block, FSDPModule)
        block.unshard()
        storages = {param.untyped_storage().data_ptr() for param in block.parameters()}
        block.reshard()
        self.check(len(storages) == 1, f"a block's gathered parameters have {len(storages)} storage")
        numel = sum(param.numel() for param in module.parameters())
        # The shard is cast in forward, a block's again in backward; every gradient is written once in float32.
        allowed = 2 * 2 * numel // self.mesh.size() + 4 * numel
        self.check(
            moved.copied_bytes <= 1.01 * allowed, f"copies {moved.copied_bytes / GIB:.2f} of {allowed / GIB:.2f} GiB"
        )

    def losses(self) -> None:
        if self.mesh.size() == 1:
            pairs = zip(self._losses[OURS], self._losses[PEER], strict=True)
            worst = max(abs(mine - theirs) for mine, theirs in pairs)
            self.check(worst <= 1e-3, f"losses of ten steps differ from FSDP2's by {worst:.1e}")

    def times(self) -> None:
        """Both in memory, in turns."""
        gc.collect()
        torch.cuda.empty_cache()
        wrapped = {name: self.wrap(name) for name in (PEER, OURS)}
        seconds: dict[str, list[float]] = {name: [] for name in wrapped}
        for number in range(self.options.rounds + 2):
            for name, pair in wrapped.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                self.step(*pair, number)
                torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - begin)
        ratios = [mine / theirs for mine, theirs in zip(seconds[OURS][2:], seconds[PEER][2:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        for name, own in seconds.items():
            print(f"{name:<12} {1e3 * statistics.median(own[2:]):.1f} ms a step")
        print(f"step time / FSDP2: {middle:.3f} [{low:.3f}, {high:.3f}] over {len(ratios)} rounds")


if __name__ == "__main__":
    sys.exit(main())
