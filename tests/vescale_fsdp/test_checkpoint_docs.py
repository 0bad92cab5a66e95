"""docs/checkpoints.md tells the truth: its blocks run one after the other in a model's own script."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import vescale_fsdp

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
SAVING, HUGGING_FACE, MOVING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@ranks(2)
def test_the_blocks_of_the_page_run() -> None:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    here = os.getcwd()
    os.chdir(folder[0])
    try:
        names = names_for(vescale_fsdp.fully_shard)
        exec(SAVING, names)
        assert names["step"] == 7
        export, load = HUGGING_FACE.splitlines()
        exec(export, names)
        names["import_safetensors"] = lambda model, folder, rename: vescale_fsdp.import_safetensors(model, folder)
        exec(load, names)
        names = names_for(fsdp2)
        before = [param.full_tensor() for param in names["model"].parameters()]
        exec(MOVING, names)
        assert not isinstance(names["model"], vescale_fsdp.FSDPModule)
        assert all(map(torch.equal, before, [param.full_tensor() for param in names["model"].parameters()]))
    finally:
        os.chdir(here)


def names_for(wrap: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    exported = {name: getattr(vescale_fsdp, name) for name in vescale_fsdp.__all__}
    return {**exported, "torch": torch, "model": model, "optimizer": optimizer, "step": 7}
