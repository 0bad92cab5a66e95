"""Our reduce-scatters for gloo against its own, in turns: medians and quartiles of ratios within a round.

    python benchmarks/reduce_scatter.py                    16 and 64 MiB over 2 and 4 ranks, float32 and bfloat16

The input is written anew before each call, as gradients are; the write is not timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vescale_fsdp import ExchangeReduceScatter, InPlaceReduceScatter

MIB = 2**20
SIZES = (16 * MIB, 64 * MIB)
DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    rounds = parser.parse_args().rounds
    # As in step.py: what is freed is kept, so that the clone is no first touch.
    os.environ.update(MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(64 << 30))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    print(f"{'ranks':<7}{'MiB':>5}{'dtype':>17}{'gloo, ms':>10}{'in place':>20}{'exchange':>20}")
    for num_ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(num_ranks, folder, rounds), nprocs=num_ranks)


def _rank(rank: int, num_ranks: int, folder: str, rounds: int) -> None:
    warnings.simplefilter("ignore")  # torch 2.13 renames reduce_scatter_tensor
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    for nbytes in SIZES:
        for dtype in DTYPES:
            seconds, *ratios = _compare(nbytes // dtype.itemsize, dtype, rank, num_ranks, rounds)
            if rank == 0:
                name = str(dtype).removeprefix("torch.")
                cells = [f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in ratios]
                head = f"{num_ranks:<7}{nbytes // MIB:>5}{name:>17}{1e3 * seconds:>10.1f}"
                print(head + "".join(f"{cell:>20}" for cell in cells), flush=True)
    dist.destroy_process_group()


def _compare(numel: int, dtype: torch.dtype, rank: int, num_ranks: int, rounds: int) -> tuple[Any, ...]:
    """The median time of gloo's own, and the quartiles of both ratios to it."""
    group = dist.group.WORLD
    assert group is not None
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    given = values.clone()
    outputs = [torch.empty(numel // num_ranks, dtype=dtype) for _ in range(3)]
    comms = (InPlaceReduceScatter(), ExchangeReduceScatter())
    calls: list[Callable[[], object]] = [
        lambda: dist.reduce_scatter_tensor(outputs[0], given, op=dist.ReduceOp.AVG),
        lambda: comms[0](outputs[1], given, group, dist.ReduceOp.AVG),
        lambda: comms[1](outputs[2], given, group, dist.ReduceOp.AVG),
    ]
    taken: list[list[float]] = [[], [], []]
    for number in range(rounds + 3):
        for turn in range(3):
            which = (number + turn) % 3
            given.copy_(values)
            dist.barrier()
            begin = time.perf_counter()
            calls[which]()
            taken[which].append(time.perf_counter() - begin)
        assert torch.equal(outputs[0], outputs[1])
        torch.testing.assert_close(outputs[0], outputs[2], rtol=2e-2, atol=2e-2)
    ratios = [[mine / other for other, mine in zip(taken[0], own, strict=True)][3:] for own in taken[1:]]
    return statistics.median(taken[0]), *(statistics.quantiles(each, n=4) for each in ratios)


if __name__ == "__main__":
    main()
