"""Sessions of nox: the process of each backend collects all its tests, and the Python versions agree."""

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nox")

import noxfile
from conformance.paths import ROOT
from conformance.plugin import judges
from conformance.strategies.one_change import CALLS
from conformance.suite import test_scale_prefill

NUMBERS = CALLS["nestedkv.anomaly_score"].changes
GIVEN = {
    "numba": noxfile.OF_NUMBA,
    "torch": noxfile.JUDGING,
    "triton": noxfile.OF_TRITON,
}


@pytest.mark.parametrize("backend", GIVEN)
def test_what_judges_a_backend_is_given_to_its_process(request: pytest.FixtureRequest, backend: str) -> None:
    """Check the tests that this run has collected. Without file arguments, these are all tests."""
    given = [ROOT / path for path in GIVEN[backend]]
    judges_of = {item.path for item in request.session.items if judges(item, backend)}
    assert [str(path) for path in judges_of if not any(path.is_relative_to(home) for home in given)] == []


@pytest.mark.parametrize("option", noxfile.OF_OTHER_PHASES)
def test_each_test_that_the_reference_leaves_out_judges_a_backend(option: str) -> None:
    """Check that each module marks all its tests. A test without the mark would run in no phase."""
    place = option.removeprefix("--ignore=")
    (backend,) = [name for name, paths in GIVEN.items() if place in paths]
    modules = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("test_*.py"))
    assert modules
    for module in modules:
        marks = [
            ast.unparse(line.value) for line in ast.parse(module.read_text(encoding="utf-8")).body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark"
        ]
        assert any(f"judges('{backend}')" in mark for mark in marks), module


def test_each_test_that_a_process_leaves_out_is_there() -> None:
    """pytest accepts names of tests that do not exist."""
    words = [*noxfile.BY_DAY, noxfile.LARGEST, *noxfile.OTHER_KERNELS, *noxfile.WITHOUT_TORCH["core"][1]]
    tests = [word.removeprefix("--deselect=").partition("[") for word in words if "::" in word]
    assert len(tests) > 20
    assert f"{test_scale_prefill.FULL[-1][0]}-{test_scale_prefill.FULL[-1][1].name}" == noxfile.LONGEST
    for name, _, case in tests:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name
        assert not case or any(change.startswith(case.removeprefix("nestedkv.anomaly_score-")) for change in NUMBERS)


def test_every_place_names_the_same_pythons() -> None:
    """The code is checked for the oldest version. The classifiers are the versions that the guide names."""
    project = tomllib.loads(Path(ROOT, "pyproject.toml").read_text(encoding="utf-8"))
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(project["project"]["classifiers"]))
    oldest = claimed[0]
    assert project["project"]["requires-python"] == f">={oldest}"
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert project["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert claimed == list(noxfile.PYTHONS[: len(claimed)])
    guide = Path(ROOT, "docs/guide/quickstart.md").read_text(encoding="utf-8")
    assert f"supports Python {', '.join(claimed[:-1])} and {claimed[-1]}." in guide
    assert "python_version" not in Path(ROOT, "constraints.txt").read_text(encoding="utf-8")


def test_every_place_names_the_same_versions_of_vllm() -> None:
    """The accepted versions are those that are tested. `seams` cannot be imported without vLLM."""
    tested = sorted([noxfile.VLLM_VERSION, *noxfile.VLLM_OLDER])
    names = [version.removesuffix(".0") for version in tested]
    oldest, newest = (tuple(map(int, name.split("."))) for name in (names[0], names[-1]))
    seams = Path(ROOT, "models_integration/engines/vllm/seams.py").read_text(encoding="utf-8")
    assert f"OLDEST, NEWEST = {oldest}, {newest}\n" in seams
    guide = Path(ROOT, "docs/guide/serving.md").read_text(encoding="utf-8")
    assert f"kvspec was tested with vLLM {', '.join(names[:-1])} and {names[-1]} on a CPU." in guide
    assert f"\nvllm-cpu=={noxfile.VLLM_VERSION} " in noxfile.VLLM_PINS.read_text(encoding="utf-8")


@pytest.mark.parametrize(("machine", "flags", "lacking"), [("aarch64", "avx2", "aarch64"), ("x86_64", "sse2", "AVX2")])
def test_a_machine_on_which_vllm_does_not_run_is_named(
    machine: str, flags: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t: fpu {flags}\n", encoding="utf-8")
    monkeypatch.setattr(noxfile, "PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.version_info", SimpleNamespace(major=3, minor=11))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert lacking in (noxfile.lacking_for_vllm() or "")
