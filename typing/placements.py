"""A user program about placements, checked by mypy --strict and never run."""

from collections.abc import Sequence
from typing import assert_type

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import (
    LayoutError,
    RaggedShard,
    StridedRaggedShard,
    Units,
    distribute_tensor,
    from_local,
)

rows = RaggedShard((0,), (1, 2, 0, 1))
flat = RaggedShard(range(2), [1, 2, 0, 1])
inside = StridedRaggedShard((0,), Units.from_runs(((1, 4),)), 2)

assert_type(rows.dims, tuple[int, ...])
assert_type(rows.local_units, Units)
assert_type(rows.local_units[1], int)
assert_type(rows.local_units[1:], tuple[int, ...])
assert_type(rows.local_units.before(2), int)
assert_type(inside.split_factor, int)

units: Sequence[int] = rows.local_units
placements: list[Placement] = [rows, Replicate(), inside]


def cut(weight: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    x = distribute_tensor(weight, mesh, [rows], src_data_rank=None)
    assert_type(x, DTensor)
    return x.redistribute(placements=[flat])


def wrap(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    try:
        return from_local(local, mesh, [rows], run_check=True)
    except LayoutError:
        return from_local(local, mesh, [rows], shape=(4, 3), stride=(3, 1))
