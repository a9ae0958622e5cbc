"""A file of the user that hides a package of kvspec: the error has the file."""

import subprocess
import sys
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
    code = f"import sys; sys.path.append({str(ROOT)!r}); import kvspec"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": ""},
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: {file} hides the package {name!r} of kvspec: rename that file or folder"
    )
