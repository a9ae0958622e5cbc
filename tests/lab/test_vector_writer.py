"""Vectors equal the results of oracles, the writer changes no published test, and checks accept no other value.

The vectors are also a zip file, which readers in three languages read without kvspec's Python code.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.checks.vector_checks import BOUNDED, complaints
from conformance.vectors import files
from conformance.vectors.codec import expanded
from conformance.vectors.files import decoded, parameters_of
from conformance.vectors.subject import STAGES
from lab.item_vectors import ITEMS
from lab.vector_writer import __main__ as store
from lab.vector_writer.brute_force import encoded
from lab.vector_writer.brute_force import score as plain_score
from lab.vector_writer.expected import OPERATIONS
from spec import SPEC_VERSION
from spec.backend import resolve
from spec.parameters import CrystalCacheParameters


# The oracles need most of a minute for the policies.
@pytest.mark.parametrize("stage", [
    pytest.param(stage, marks=pytest.mark.nightly if stage == "policies" else ()) for stage in files.stages()
])
def test_a_file_is_what_the_oracles_give(stage: str) -> None:
    built = store.built(stage)
    assert files.stored(stage) == built
    assert files.path_of(stage).read_text(encoding="utf-8") == store.text_of(built) + "\n"


def test_a_tcId_stands_once_in_its_file() -> None:
    for stage in files.stages():
        assert store.repeated(files.stored(stage)) == []


@pytest.fixture
def home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a folder with a copy of one published file."""
    (tmp_path / "score.json").write_bytes(files.path_of("score").read_bytes())
    monkeypatch.setattr(files, "HOME", tmp_path)
    return tmp_path


def edited(home: Any, old: str, new: str) -> None:
    text = (home / "score.json").read_text(encoding="utf-8")
    assert old in text
    (home / "score.json").write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"tcId": 12,', '"tcId": 99,', "score: a published test was changed or removed"),
        ('"comment": "all equal gives 0"', '"comment": "other"', "score: a published test was changed or removed"),
        ('"M_tilde": ["nan", "nan"]', '"M_tilde": ["nan", "inf"]', "score: tcId 4: expected was"),
        ('"tcId": 12,', '"tcId": 2,', "score: tcId 2: used 2 times"),
        ("lab.vector_writer", "by hand", "score: header or notes are stale"),
    ],
)
def test_the_check_names_a_difference_and_nothing_is_written(
    home: Any, capsys: pytest.CaptureFixture[str], old: str, new: str, problem: str,
) -> None:
    edited(home, old, new)
    before = (home / "score.json").read_bytes()
    assert store.main([]) == 1
    assert problem in capsys.readouterr().out
    assert store.main(["--write"]) == int("stale" not in problem)
    assert (home / "score.json").read_bytes() == before or "stale" in problem


def drafted(home: Any, *tests: dict[str, Any]) -> None:
    """Write the file with drafts in its first group."""
    file = files.stored("score")
    file["testGroups"][0]["tests"] += tests
    (home / "score.json").write_text(json.dumps(file), encoding="utf-8")


def test_writing_completes_drafts_and_changes_no_other_test(home: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = files.stored("score")["testGroups"]
    inputs = before[0]["tests"][1]["inputs"]
    drafted(
        home, {"tcId": 901, "comment": "a draft", "flags": ["Plain"], "inputs": {**inputs, "M_bar": [0.5, 2.5]}},
        {"tcId": 902, "comment": "refused", "flags": ["Plain"], "inputs": inputs, "refused": "M_bar"},
    )
    assert store.main([]) == 1
    assert "score: tcId 901: a draft; --write completes it" in capsys.readouterr().out
    assert store.main(["--write"]) == 0
    assert store.main([]) == 0
    *old, valid, refused = files.stored("score")["testGroups"][0]["tests"]
    assert old == before[0]["tests"]
    assert (valid["inputs"]["M_bar"], valid["result"]) == (["0x1.0000000000000p-1", "0x1.4000000000000p+1"], "valid")
    assert refused["expected"] == {"argument": "M_bar"}


def test_a_bound_of_a_draft_is_the_operation_s_but_for_what_is_exact(home: Any) -> None:
    inputs = files.stored("score")["testGroups"][0]["tests"][1]["inputs"]
    draft = {"comment": "a draft", "flags": ["Plain"], "inputs": inputs}
    drafted(home, {"tcId": 901, **draft}, {"tcId": 902, **draft, "exact": ["M_tilde"]})
    bounded, exact = store.built("score")["testGroups"][0]["tests"][-2:]
    assert (bounded["bounded"], "bounded" in exact) == (["M_tilde"], False)


def test_a_score_that_is_not_given_stays_nan() -> None:
    (nan,) = plain_score([0.5], [float("nan")], 1.0)
    assert nan != nan


def test_every_operation_of_the_writer_is_run() -> None:
    assert OPERATIONS.keys() == ITEMS.keys() | STAGES.keys()


@cache
def valid_vectors() -> Mapping[str, list[tuple[Any, Any]]]:
    """Return groups and tests by operation."""
    actual = defaultdict[str, list[tuple[Any, Any]]](list)
    for _, group, test in files.published():
        if test["result"] == "valid":
            actual[group["operation"]].append((group, test))
    return actual


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_result_is_a_complaint(operation: str) -> None:
    """Check that every expected value of every valid vector is compared: a different value is not accepted."""
    bound = BOUNDED.get(operation)
    for group, test in valid_vectors()[operation]:
        p, given = parameters_of(decoded(group["parameters"])), decoded(test)
        given["inputs"] = expanded(given["inputs"])
        right = ITEMS[operation](given["inputs"], p) if operation in ITEMS else run_numpy(operation, given, p)
        for name in given["expected"]:
            # A choice inside its bound may have either result. The bounded results of prefill are read from its record.
            if name in given.get("bounded", []) and (name in ("intra", "cross") or operation == "prefill"):
                continue
            wrong = spoiled(right[name])
            if wrong is not None:
                actual = list(complaints({**right, name: wrong}, given, bound, p, "float64"))
                assert actual, (test["tcId"], name)


def run_numpy(operation: str, given: Any, p: CrystalCacheParameters) -> Mapping[str, Any]:
    return STAGES[operation](resolve("numpy"), given["inputs"], p)


def spoiled(value: Any) -> Any:
    """Return the value with its first number changed, or a longer text. Return None if there is no number."""
    if isinstance(value, str):
        return value + "0"
    if isinstance(value, list) and value and isinstance(value[0], list | np.ndarray):
        first = spoiled(value[0])
        return None if first is None else [np.asarray(first).tolist(), *value[1:]]
    array = np.array(value)
    if not array.size:
        return None
    array.flat[0] = not array.flat[0] if array.dtype == np.bool_ else np.nan_to_num(array.flat[0]) + 1
    return array


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-320, float("inf"), -float("inf"), 3, True, None, "28%", [[0.5], []]])
def test_values_survive_json(value: object) -> None:
    again = decoded(json.loads(json.dumps(encoded({"value": value}))))["value"]
    assert repr(again) == repr(value)


MOST_LINES = 60


def read_by(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, env={"PATH": "/usr/bin:/bin"})


def compiled_reader(folder: Path) -> list[str]:
    cc = locate("cc")
    read_by(cc, "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "readers/read.c", "-o", "read", cwd=folder)
    return [str(folder / "read")]


def locate(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


READERS: dict[str, Callable[[Path], list[str]]] = {
    "read.py": lambda folder: [sys.executable, "-I", "readers/read.py"],
    "read.c": compiled_reader,
    "read.js": lambda folder: [locate("node"), "readers/read.js"],
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked folder of vectors."""
    home = tmp_path_factory.mktemp("package")
    store.main(["--package", str(home)])
    (created,) = home.glob("*.zip")
    first = created.read_bytes()
    store.main(["--package", str(home)])
    assert created.read_bytes() == first
    with zipfile.ZipFile(created) as archive:
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
    """Check that a reader detects a wrong kept set too."""
    folder = package / "vectors"
    assert len((folder / "readers" / reader).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    command = [*READERS[reader](folder), *(f"{stage}.json" for stage in files.stages())]
    tests = [(group["operation"], test) for _, group, test in files.published()]
    checked = [test["tcId"] for operation, test in tests if operation == "PO-KNORM"]
    right = read_by(*command, cwd=folder)
    words = f"{len(tests)} vectors read, {len(checked)} of PO-KNORM checked"
    assert (right.returncode, right.stdout) == (0, f"{words}, 0 wrong\n"), right.stderr
    text = (folder / "policies.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    for group in stored["testGroups"]:
        if group["operation"] == "PO-KNORM":
            for test in (group["tests"][0], group["tests"][-1]):
                test["expected"]["kept"][-1][0] += 1
    (folder / "policies.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")
    wrong = read_by(*command, cwd=folder)
    (folder / "policies.json").write_text(text, encoding="utf-8")
    assert wrong.returncode == 1
    assert wrong.stdout.endswith(f"{words}, 2 wrong\n")
    assert all(f"tcId {tcId} is wrong" in wrong.stdout for tcId in (checked[0], checked[-1]))
