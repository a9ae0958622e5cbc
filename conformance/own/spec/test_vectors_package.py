"""The vectors as a zip file, which readers in three languages read without our Python."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.assurance.vectors_package import main
from conformance.vectors import files
from spec import SPEC_VERSION

MOST_LINES = 60


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, env={"PATH": "/usr/bin:/bin"})


def compiled(folder: Path) -> list[str]:
    cc = found("cc")
    run(cc, "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "readers/read.c", "-o", "read", cwd=folder)
    return [str(folder / "read")]


def found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


READERS: dict[str, Callable[[Path], list[str]]] = {
    "read.py": lambda folder: [sys.executable, "-I", "readers/read.py"],
    "read.c": compiled,
    "read.js": lambda folder: [found("node"), "readers/read.js"],
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked folder of vectors."""
    home = tmp_path_factory.mktemp("package")
    main([str(home)])
    (made,) = home.glob("*.zip")
    first = made.read_bytes()
    main([str(home)])
    assert made.read_bytes() == first
    with zipfile.ZipFile(made) as archive:
        archive.extractall(home)
    return home / f"kvspec-vectors-{SPEC_VERSION}"


def test_the_package_has_all_vectors_and_pages(package: Path) -> None:
    assert {path.stem for path in (package / "vectors").glob("*.json")} == {*files.stages(), "schema"}
    for name in ("LICENSE", "README.md", "implementing.json", "policies.md", "vectors/README.md"):
        assert (package / name).stat().st_size > 100
    number = sum(files.stored(stage)["numberOfTests"] for stage in files.stages())
    assert f"\n{number} tests in {len(files.stages())} files" in (package / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_reads_all_vectors_and_checks_a_method(reader: str, package: Path) -> None:
    """It finds a wrong kept set, too."""
    folder = package / "vectors"
    assert len((folder / "readers" / reader).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    command = [*READERS[reader](folder), *(f"{stage}.json" for stage in files.stages())]
    tests = [(group["operation"], test) for _, group, test in files.published()]
    checked = [test["tcId"] for operation, test in tests if operation == "PO-KNORM"]
    right = run(*command, cwd=folder)
    words = f"{len(tests)} vectors read, {len(checked)} of PO-KNORM checked"
    assert (right.returncode, right.stdout) == (0, f"{words}, 0 wrong\n"), right.stderr
    text = (folder / "policies.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    for group in stored["testGroups"]:
        if group["operation"] == "PO-KNORM":
            for test in (group["tests"][0], group["tests"][-1]):
                test["expected"]["kept"][-1][0] += 1
    (folder / "policies.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")
    wrong = run(*command, cwd=folder)
    (folder / "policies.json").write_text(text, encoding="utf-8")
    assert wrong.returncode == 1
    assert wrong.stdout.endswith(f"{words}, 2 wrong\n")
    assert all(f"tcId {tcId} is wrong" in wrong.stdout for tcId in (checked[0], checked[-1]))
