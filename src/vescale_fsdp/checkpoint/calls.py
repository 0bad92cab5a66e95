"""What a program says that our fully_shard does not understand as torch's does: found in its source and in its model.

Nothing is run: source files are parsed, and parameters are looked at on the meta device. What cannot be seen there (a
call through a variable, a file that the model's classes do not come from) is not found.
"""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..group.extensions import is_extension
from ..managed import managed_as

__all__ = ["Finding", "findings_in_model", "findings_in_source", "sources_of"]


@dataclass(frozen=True)
class Finding:
    """Something at a line of a file, or at a parameter: what it is, and what to do.

    `must_change`: it fails or does nothing with ours; otherwise it works, but differently.
    """

    where: str
    what: str
    do: str
    must_change: bool


_PRIVATE = "torch's private state is not there", "use FSDPModule's methods, or vescale_fsdp.report", True
_FSDP1 = "is of the older FullyShardedDataParallel", "wrap with fully_shard, and use torch.distributed.checkpoint", True

_NAMES: dict[str, tuple[str, str, bool]] = {
    "FullyShardedDataParallel": _FSDP1,
    "summon_full_params": _FSDP1,
    "state_dict_type": _FSDP1,
    "ShardingStrategy": _FSDP1,
    "FSDPParam": _PRIVATE,
    "FSDPParamGroup": _PRIVATE,
    "FSDPState": _PRIVATE,
    "_fsdp_param_group": _PRIVATE,
    "fsdp_params": _PRIVATE,
    "_sharded_param_data": _PRIVATE,
}
"""Names and attributes: what they mean for us, what to do, whether that has to be done."""

_PLACEMENTS = "shards are placed as RaggedShard, not Shard(0)", "take the placements of the parameter itself", False
_IMPORT = "is torch's", "import it from vescale_fsdp, or call vescale_fsdp.from_fsdp2(model, optimizer)", True


def sources_of(model: nn.Module, module_name: str) -> list[Path]:
    """The files of the factory's module and of the model's classes, without installed packages."""
    names = dict.fromkeys([module_name, *(type(module).__module__ for module in model.modules())])
    installed = tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib")})
    found = []
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and file.endswith(".py") and not file.startswith(installed):
            found.append(Path(inspect.getsourcefile(sys.modules[name]) or file))
    return found


def findings_in_source(path: Path) -> list[Finding]:
    """Calls, names and attributes of one file that need a look; SyntaxError if it is no Python."""
    tree = ast.parse(path.read_text(), filename=str(path))
    found = {}
    for node in ast.walk(tree):
        for name, (what, do, must_change) in _meanings(node):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            found[where, name] = Finding(where, f"{name} {what}", do, must_change)
    return sorted(found.values(), key=lambda finding: int(finding.where.rpartition(":")[2]))


def _meanings(node: ast.AST) -> Iterator[tuple[str, tuple[str, str, bool]]]:
    match node:
        case ast.ImportFrom(module=str(module)) if module.startswith("torch.distributed"):
            for alias in node.names:
                if alias.name in ("fully_shard", "register_fsdp_forward_method"):
                    yield alias.name, _IMPORT
                elif alias.name in _NAMES:
                    yield alias.name, _NAMES[alias.name]
        case ast.Attribute(attr=name) if name in _NAMES:
            yield name, _NAMES[name]
        case ast.Attribute(attr="fully_shard", value=value) if "torch" in ast.unparse(value):
            yield "fully_shard", _IMPORT
        case ast.Compare(comparators=[ast.Call(func=ast.Name(id="Shard")), *_]):
            yield "comparison with Shard:", _PLACEMENTS
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id="Shard")]):
            yield "isinstance(..., Shard):", _PLACEMENTS


def findings_in_model(named_params: Iterable[tuple[str, nn.Parameter]]) -> list[Finding]:
    """Parameters that ours takes in another way than torch's fully_shard, or not at all."""
    return [finding for fqn, param in named_params for finding in _findings_at(fqn, param)]


def _findings_at(fqn: str, param: nn.Parameter) -> Iterator[Finding]:
    if managed_as(param) is not None:
        yield Finding(fqn, "is sharded by vescale_fsdp already", "check the model before it is wrapped", True)
    elif isinstance(param, DTensor):
        yield Finding(fqn, "is a DTensor", "check the model before it is sharded or made tensor-parallel", True)
    elif not param.is_contiguous():
        yield Finding(fqn, f"has stride {param.stride()}", "call .contiguous(), which torch asks for too", True)
    if not param.ndim:
        yield Finding(fqn, "is a scalar, which torch's fully_shard refuses", "nothing: one rank keeps it", False)
    if is_extension(param):
        yield Finding(fqn, f"is a {type(param).__name__} that gathers itself", "nothing: rows stay whole", False)
    if _torch.tensor_hooks(param):
        yield Finding(fqn, "has tensor hooks", "register them on the sharded parameter; both engines drop them", True)
