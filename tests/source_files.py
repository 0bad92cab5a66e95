"""What the source files say, read with `ast` and never imported: packages, reading orders, imports, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(
    sorted(path.parent for path in [*ROOT.glob("src/*/__init__.py"), *ROOT.glob("plugins/*/src/*/__init__.py")])
)
"""Top-level packages: ours and each plugin's."""


def python_files(*folders: str) -> list[Path]:
    """Every .py file below the folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path, package: Path) -> str:
    """`vescale_fsdp.cli.plan` for a file of `package`, which is the folder of vescale_fsdp."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def reading_order(folder: Path) -> list[str] | None:
    """What the package's docstring lists, as `Reading order: a, b.` or as an indented block after those words."""
    docstring = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    _, found, rest = docstring.partition("eading order")
    if not found:
        return None
    if rest.startswith(":") and rest[1:].split("\n")[0].strip():
        listed = re.split(r"\.(?:\s|$)", rest, maxsplit=1)[0]
    else:
        block = re.search(r"\n((?: {4,}\S.*\n?)+)", rest)
        listed = block[1] if block else ""
    return re.findall(r"\w+", listed)


def members(folder: Path) -> set[str]:
    """Modules and subpackages of a package folder."""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports, lazy ones and those under TYPE_CHECKING too; names joined to their module."""
    here = module_name(path, package).split(".")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = here if path.name == "__init__.py" else here[:-1]
            base = folder[: len(folder) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def private_torch_names(path: Path) -> Iterator[tuple[int, str]]:
    """Imports of, and attributes on, torch's modules that have a part with a leading underscore."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                full = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                if full.split(".")[0] == "torch":
                    aliases[alias.asname or alias.name.split(".")[0]] = full if alias.asname else alias.name
                    if _is_private(full):
                        yield node.lineno, full
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = _root(node)
            if root in aliases or node.attr in PRIVATE_TENSOR_NAMES:
                yield node.lineno, ast.unparse(node)


PRIVATE_TENSOR_NAMES = {"_local_tensor", "_op_dispatcher", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"}


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def public_names(path: Path) -> tuple[list[str] | None, set[str]]:
    """A module's `__all__` (None if it has none), and the names without underscore that its top level binds."""
    declared: list[str] | None = None
    bound: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            declared = [
                ast.literal_eval(element) for element in ast.walk(node.value) if isinstance(element, ast.Constant)
            ]
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__":
            declared = [
                ast.literal_eval(each) for each in ast.walk(node.value or node) if isinstance(each, ast.Constant)
            ]
        else:
            bound |= _bound_by(node)
    return declared, {name for name in bound if not name.startswith("_")}


def _bound_by(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    if isinstance(node, ast.If):
        return {name for each in [*node.body, *node.orelse] for name in _bound_by(each)}
    if isinstance(node, ast.Try):
        return {
            name for part in [node.body, *(h.body for h in node.handlers)] for each in part for name in _bound_by(each)
        }
    return set()
