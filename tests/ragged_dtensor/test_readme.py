"""The README's examples run, and what it draws is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import ranks
from torch.distributed.device_mesh import init_device_mesh

import ragged_dtensor
from ragged_dtensor import RaggedShard, distribute_tensor

README = Path(ragged_dtensor.__file__).parent / "README.md"


@ranks(2)
def test_every_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    namespace: dict[str, object] = {}
    assert len(blocks) > 8
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)


@ranks(2)
def test_the_drawing_shows_the_owners() -> None:
    drawing = [
        line.split() for line in README.read_text().splitlines() if re.fullmatch(r" {4}[01](?: +[01]){11}", line)
    ]
    assert len(drawing) == 3
    mesh = init_device_mesh("cpu", (2,))
    for i, placement in enumerate(
        (RaggedShard((0,), (1, 2)), RaggedShard((0, 1), (5, 7)), RaggedShard((0, 1), (0, 1)))
    ):
        owners = distribute_tensor(torch.zeros(3, 4), mesh, [placement])
        owners.to_local().fill_(dist.get_rank())
        drawn = torch.tensor([[float(owner) for owner in line[4 * i : 4 * i + 4]] for line in drawing])
        assert torch.equal(owners.full_tensor(), drawn)
