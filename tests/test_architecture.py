"""The shape of the project: who may import whom, where torch's private names live, what files look like."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_files import (
    PACKAGES,
    ROOT,
    imports,
    members,
    module_name,
    private_torch_names,
    public_names,
    python_files,
    reading_order,
    tree_of,
)

OURS = [package for package in PACKAGES if package.parent == ROOT / "src"]
PLUGINS = [package for package in PACKAGES if package.parent != ROOT / "src"]
FOLDERS = [path.parent for package in PACKAGES for path in sorted(package.rglob("__init__.py"))]
MAX_FUNCTION_LINES = 60


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def named(path: Path) -> str:
    return path.name if path in PACKAGES else str(path.relative_to(ROOT / "src"))


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_a_package_lists_each_of_its_files_once_in_reading_order(folder: Path) -> None:
    listed = reading_order(folder) or []
    if len(members(folder)) > 1 or listed:
        assert sorted(listed) == sorted(members(folder))


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_a_file_imports_only_what_stands_before_it(package: Path) -> None:
    violations = [
        f"{where(path, line)} imports {name}"
        for path in sorted(package.rglob("*.py"))
        if path != package / "__init__.py"
        for line, name in imports(path, package)
        if not stands_before(name, path, package)
    ]
    assert not violations, "\n".join(violations)


def stands_before(name: str, path: Path, package: Path) -> bool:
    """Whether the import leaves the package, or reaches something that its reading order lists before this file."""
    target, here = name.split("."), module_name(path, package).split(".")
    if target[0] != here[0]:
        return True
    folder = package
    for theirs, mine in zip(target[1:], here[1:], strict=False):
        if theirs != mine:
            order = reading_order(folder) or []
            # Files that are not listed have a test of their own.
            return not {theirs, mine} <= set(order) or order.index(theirs) < order.index(mine)
        folder /= mine
    # Its own submodule: a package's `__init__` comes after its files. Anything else is the package itself.
    return path.name == "__init__.py" and len(target) > len(here) and target[len(here)] in members(folder)


FORBIDDEN = {"ragged_dtensor": ("vescale_fsdp", *(plugin.name for plugin in PLUGINS))}
FORBIDDEN["vescale_fsdp"] = tuple(plugin.name for plugin in PLUGINS)


@pytest.mark.parametrize("package", OURS, ids=named)
def test_imports_flow_from_plugins_to_vescale_fsdp_to_ragged_dtensor(package: Path) -> None:
    violations = [
        f"{where(path, line)} imports {name}"
        for path in sorted(package.rglob("*.py"))
        for line, name in imports(path, package)
        if name.split(".")[0] in FORBIDDEN[package.name]
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_other_packages_are_used_by_their_public_names(package: Path) -> None:
    others = {other.name for other in PACKAGES} - {package.name}
    violations = [
        f"{where(path, line)} imports {name}"
        for path in sorted(package.rglob("*.py"))
        for line, name in imports(path, package)
        if name.split(".")[0] in others and re.search(r"\._", name)
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("plugin", PLUGINS, ids=named)
def test_a_plugin_imports_what_vescale_fsdp_exports(plugin: Path) -> None:
    exported = {
        f"{module_name(folder / '__init__.py', package)}.{name}"
        for package in OURS
        for folder in FOLDERS
        if folder.is_relative_to(package)
        for name in public_names(folder / "__init__.py")[0] or []
    }
    ours = {package.name for package in OURS}
    violations = [
        f"{where(path, line)} imports {name}"
        for path in sorted(plugin.rglob("*.py"))
        for line, name in imports(path, plugin)
        if name.split(".")[0] in ours and name not in exported | ours
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_private_torch_names_stand_in_one_file(package: Path) -> None:
    violations = [
        f"{where(path, line)} uses {name}"
        for path in sorted(package.rglob("*.py"))
        if path != package / "_torch.py"
        for line, name in private_torch_names(path)
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_a_package_exports_what_its_all_says_and_nothing_else(folder: Path) -> None:
    declared, bound = public_names(folder / "__init__.py")
    assert declared is not None, f"{folder / '__init__.py'} has no __all__"
    assert declared == sorted(declared, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    stray = bound - set(declared) - members(folder) - from_elsewhere(folder / "__init__.py")
    assert not stray, f"public but not in __all__: {sorted(stray)}"


def from_elsewhere(path: Path) -> set[str]:
    """Names that a package imports from other packages, and a subpackage from anywhere: using them is no promise."""
    package = next(package for package in PACKAGES if package in path.parents)
    found = {name for _, name in imports(path, package) if name.split(".")[0] != package.name or path.parent != package}
    return {name.split(".")[-1] for name in found}


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_every_name_in_all_is_defined(package: Path) -> None:
    lazy = "__getattr__"
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(package.rglob("*.py"))
        for declared, bound in [public_names(path)]
        for name in declared or []
        if name not in bound and lazy not in path.read_text()
    ]
    assert not missing, "\n".join(missing)


FINGERPRINT = """
import json, sys, types, warnings
import torch, torch.distributed.checkpoint, torch.distributed.device_mesh, torch.distributed.fsdp
import torch.distributed.tensor, torch.nn.utils, torch.optim

before = [name for name in sys.modules if name.split(".")[0] == "torch"]

def members():
    for module_name in before:
        for name, value in list(vars(sys.modules[module_name]).items()):
            yield f"{module_name}.{name}", value
            if isinstance(value, type) and value.__module__.startswith("torch"):
                yield from ((f"{module_name}.{name}.{key}", each) for key, each in list(vars(value).items()))

def fingerprint():
    kept = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, property)
    found = ((name, value) for name, value in members() if isinstance(value, kept))
    prints = {name: (value, id(getattr(value, "__code__", None))) for name, value in found}
    prints["safe globals"] = (len(torch.serialization.get_safe_globals()), 0)
    return prints

first = fingerprint()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import ragged_dtensor, vescale_fsdp
second = fingerprint()
print(json.dumps({
    "changed": [name for name in first if name not in second or first[name] != second[name]],
    "groups": torch.distributed.is_initialized(),
    "seen": len(first),
}))
"""


@pytest.mark.subprocess
def test_importing_changes_nothing_in_torch() -> None:
    done = subprocess.run([sys.executable, "-c", FINGERPRINT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["seen"] > 10_000
    assert (result["changed"], result["groups"]) == ([], False)


def all_python_files() -> list[Path]:
    return python_files("src", "tests", "typing", "plugins", "benchmarks")


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = [
        f"{where(path, node.lineno)} {node.name}: {num_lines(node)} lines"
        for path in all_python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and num_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of code: a docstring may be as long as it likes."""
    docstring = ast.get_docstring(function, clean=False)
    return (function.end_lineno or 0) - function.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)


def test_the_first_line_of_each_file_says_what_it_is() -> None:
    silent = [str(path.relative_to(ROOT)) for path in all_python_files() if not re.match(r'r?"""\S', path.read_text())]
    assert not silent, "\n".join(silent)


def test_no_file_has_a_name_that_says_nothing() -> None:
    banned = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [path for path in all_python_files() if path.stem in banned or path.parent.name in banned]


def test_the_folder_named_typing_is_no_package() -> None:
    assert not (ROOT / "typing" / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_a_package_says_that_it_is_typed(package: Path) -> None:
    assert (package / "py.typed").exists()


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(r"(?<![\w.])/(?:work|farm|root|home|tmp|opt|Users)/")
    folders = ("src", "tests", "typing", "plugins", "benchmarks", "docs", ".ci")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts = [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]
    found = [
        where(path, number)
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine.search(line)
    ]
    assert not found, "\n".join(found)


TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".txt", ".json", ".yml", ".sh", "", ".csv"}
