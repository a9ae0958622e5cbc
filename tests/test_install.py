"""First steps of a new user: a file that hides a package, the lines of the installation, and the entry points."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conformance.paths import ROOT


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("path", "name"), [
    ("spec.py", "spec"), ("reference/__init__.py", "reference"), ("conformance.py", "conformance"),
])
def test_a_file_in_the_way_is_named(path: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("", encoding="utf-8")
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import kvspec"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": ""},
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: {file} hides the package {name!r} of kvspec: rename that file or folder"
    )


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("page", ["README.md", "docs/guide/quickstart.md"])
def test_a_machine_without_a_gpu_comes_first_and_nothing_has_to_be_filled_in(page: str) -> None:
    block = (ROOT / page).read_text(encoding="utf-8").split("## Install")[1].split("```")[1]
    installs = [line for line in block.splitlines() if "pip install" in line and "nox" not in line]
    assert "download.pytorch.org/whl/cpu" in installs[0]
    assert "-e \"." in installs[1]
    assert not any(word.isupper() and len(word) > 4 for word in block.split())


@pytest.mark.law("as-it-is-described")
def test_lm_eval_finds_the_model_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["kvspec"].partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (mutated_class,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    assert [ast.unparse(one) for one in mutated_class.decorator_list] == ["register_model('kvspec')"]
