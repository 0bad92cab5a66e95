"""docs/write-a-plugin.md: its format installs into a fresh venv, is found there, and passes the contract tests."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from vescale_fsdp import ParamPolicy, plugins

DOC = Path(__file__).parents[2] / "docs" / "write-a-plugin.md"
FORMAT, TESTS, CONSTRAINT = range(3)

USE = """
import json
from vescale_fsdp import ParamPolicy
from vescale_fsdp.plugins import registry
asked = registry().granularity_of("w", (96, 128), ParamPolicy(format="int4_row"))
print(json.dumps([registry().formats["int4_row"].distribution, asked.numel, asked.reasons]))
"""


def blocks(language: str) -> list[str]:
    """The document's code, without what it says is not run."""
    text = re.sub(r"<!-- not run.*?-->\n```.*?```", "", DOC.read_text(), flags=re.S)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_format_takes_fewer_than_forty_lines() -> None:
    assert len(blocks("python")[FORMAT].splitlines()) < 40


def test_the_constraint_combines_with_a_format_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plugins.Registry()
    for index, name in ((FORMAT, "int4_row"), (CONSTRAINT, "row_pairs")):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(blocks("python")[index], vars(module))
        made.register(module, distribution=name.replace("_", "-"))
    granularity = made.granularity_of("w", (96, 64), ParamPolicy(format="int4_row", optimizer="row_pairs"))
    assert granularity.numel == 128
    assert granularity.reasons == ("1 row (int4_row by int4-row)", "2 rows (row_pairs by row-pairs)")


@pytest.mark.subprocess
def test_the_plugin_installs_into_a_fresh_venv_and_passes_its_contract(tmp_path: Path) -> None:
    python, *_ = blocks("python")
    (tmp_path / "int4_row.py").write_text(python)
    (tmp_path / "pyproject.toml").write_text(blocks("toml")[0])
    (tmp_path / "test_int4_row.py").write_text(blocks("python")[TESTS])
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    fresh = tmp_path / "venv" / "bin" / "python"
    site = Path(run(fresh, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    # The fresh venv looks through to torch, vescale-fsdp and the build backend; nothing is downloaded.
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", ".")
    run(fresh, *install, cwd=tmp_path)
    (tmp_path / "int4_row.py").unlink()  # what is imported from here on is what was installed
    assert '["int4-row", 64, ["64 elements (int4_row by int4-row)"]]' in run(fresh, "-c", USE, cwd=tmp_path)
    assert "passed" in run(fresh, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_int4_row.py", cwd=tmp_path)
