"""The published vectors hold: for the reference item by item, for the judged backend stage by stage."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest

from conformance.checks.refusals import refused
from conformance.items import items_of
from conformance.plugin import skip_without
from conformance.vectors import store
from conformance.vectors.brute_force import score as plain_score
from conformance.vectors.case import decoded, encoded, parameters_of
from conformance.vectors.cases import STAGES
from conformance.vectors.expected import OPERATIONS
from conformance.vectors.judge import complaints
from conformance.vectors.nestedkv_subject import NESTEDKV_STAGES
from conformance.vectors.notes import NOTES
from conformance.vectors.subject import ITEMS
from conformance.vectors.subject import STAGES as STAGE_RUNS
from conformance.vectors.subject_decode import DECODE_STAGES
from spec.backend import Backend, resolve
from spec.parameters import CrystalCacheParameters

SCHEMA = json.loads((store.HOME / "schema.json").read_text(encoding="utf-8"))
PAGES = [
    path.read_text(encoding="utf-8")
    for pattern in (
        "crystalcache*.md", "policies.md", "injection.md", "nestedkv.md", "diversity.md", "triattention.md"
    )
    for path in store.HOME.parent.glob(pattern)
]


def published() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Stage, group and test of every vector."""
    for stage in STAGES:
        for group in store.stored(stage)["testGroups"]:
            for test in group["tests"]:
                yield stage, group, test


def cases(of_stages: bool) -> list[Any]:
    """Vectors of stages or of items, under the marks of their items."""
    return [
        pytest.param(
            group, test, id=f"{stage}-{test['tcId']}", marks=[pytest.mark.spec(id=item) for item in test["items"]]
        )
        for stage, group, test in published() if (group["operation"] in STAGE_RUNS) == of_stages
    ]


@contextmanager
def unchecked() -> Iterator[None]:
    """Refusals are for users, who run without the shape checks of a test session."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def families_of(operation: str) -> tuple[str, ...]:
    """The stage families that an operation runs."""
    if operation in NESTEDKV_STAGES:
        return ("nestedkv",)
    if operation in ("decode_step", "extend"):
        return ("crystal", "breath")
    return ("breath",) if operation in DECODE_STAGES else ("crystal",)


def holds(group: Any, test: Any, run: Any, precision: str) -> None:
    p, inputs = parameters_of(decoded(group["parameters"])), decoded(test["inputs"])
    if test["result"] == "invalid":
        with unchecked(), refused(test["expected"]["argument"]):
            run(inputs, p)
    else:
        assert list(complaints(run(inputs, p), decoded(test), group["operation"], p, precision)) == []


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("group", "test"), cases(of_stages=False))
def test_the_reference_holds_a_vector_of_an_item(group: Any, test: Any) -> None:
    holds(group, test, ITEMS[group["operation"]], "float64")


@pytest.mark.parametrize(("group", "test"), cases(of_stages=True))
def test_the_backend_holds_a_vector_of_a_stage(judged: Backend, precision: str, group: Any, test: Any) -> None:
    skip_without(judged, *families_of(group["operation"]))
    holds(group, test, lambda i, p: STAGE_RUNS[group["operation"]](judged, i, p), precision)


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_is_what_the_oracles_give(stage: str) -> None:
    assert store.stored(stage) == store.built(stage)
    assert store.path_of(stage).read_text(encoding="utf-8") == store.text_of(store.built(stage)) + "\n"


@pytest.fixture(scope="module")
def validator() -> Any:
    return pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_fits_the_schema(validator: Any, stage: str) -> None:
    validator.validate(store.stored(stage))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["testGroups", 0, "tests", 0, "tcId"], 0),
        (["testGroups", 0, "tests", 0, "flags"], []),
        (["testGroups", 0, "tests", 0, "inputs", "L"], 0.5),
        (["testGroups", 0, "tests", 0, "result"], "acceptable"),
        (["testGroups", 0, "tests", 0, "items"], ["Eq. 4"]),
        (["testGroups", 0, "operation"], "memory"),
        (["testGroups", 1, "tests", 15, "flags"], ["Plain"]),
        (["testGroups", 1, "tests", 15, "expected"], {"tokens": 1}),
        (["notes", "Plain", "bugType"], "BUG"),
    ],
)
def test_the_schema_refuses_what_it_forbids(validator: Any, path: list[str | int], value: object) -> None:
    file = store.built("budgets")
    where: Any = file
    for step in path[:-1]:
        where = where[step]
    assert path[-1] in where or isinstance(path[-1], int)
    where[path[-1]] = value
    assert not validator.is_valid(file)


def test_every_item_has_a_vector_and_every_flag_a_use() -> None:
    tests = [test for _, _, test in published()]
    assert {item for test in tests for item in test["items"]} == {
        item for page in PAGES for item, _ in items_of(page)
    }
    assert {flag for test in tests for flag in test["flags"]} == NOTES.keys()
    assert OPERATIONS.keys() == ITEMS.keys() | STAGE_RUNS.keys()


@pytest.mark.parametrize(
    "module",
    [
        "brute_force", "expected", "expected_injection", "case", "policy_oracles", "nestedkv_oracles",
        "diversity_oracles",
    ],
)
def test_expected_values_share_nothing_with_what_they_judge(module: str) -> None:
    text = (Path(store.__file__).with_name(f"{module}.py")).read_text(encoding="utf-8")
    imported = re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE)
    assert not {"numpy", "reference", "accelerated", "models_integration"} & set(imported)


def test_a_tcId_stands_once_in_its_file() -> None:
    for stage in STAGES:
        assert store.repeated(store.built(stage)) == []


def test_the_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main([]) == 0
    assert "as the oracles have them" in capsys.readouterr().out


@pytest.fixture
def home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the published files."""
    for path in store.HOME.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(store, "HOME", tmp_path)
    return tmp_path


def edited(home: Any, old: str, new: str) -> None:
    text = (home / "score.json").read_text(encoding="utf-8")
    assert old in text
    (home / "score.json").write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"tcId": 12,', '"tcId": 99,', "score: tcId 99: published, but no case makes it"),
        ('"tcId": 12,', '"tcId": 99,', "score: tcId 12: not published; --write adds it"),
        ('"comment": "all equal gives 0"', '"comment": "other"', "score: tcId 2: comment was other, is all equal"),
        ('"M_tilde": ["nan", "nan"]', '"M_tilde": ["nan", "inf"]', "score: tcId 4: expected was"),
        ("conformance.vectors", "by hand", "score: header or notes are stale"),
    ],
)
def test_the_check_names_a_difference(
    home: Any, capsys: pytest.CaptureFixture[str], old: str, new: str, problem: str,
) -> None:
    edited(home, old, new)
    assert store.main([]) == 1
    assert problem in capsys.readouterr().out


def test_a_file_that_no_stage_makes_is_named(home: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "decode.json").write_text("{}", encoding="utf-8")
    assert store.main([]) == 1
    assert "decode: a file that no stage makes" in capsys.readouterr().out


def test_writing_adds_and_never_changes(home: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "score.json").unlink()
    assert store.main(["--write"]) == 0
    assert store.main([]) == 0
    edited(home, '"comment": "all equal gives 0"', '"comment": "other"')
    before = (home / "score.json").read_bytes()
    assert store.main(["--write"]) == 1
    assert (home / "score.json").read_bytes() == before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_result_is_a_complaint(operation: str) -> None:
    """Every expected value of every valid vector is read: another one is not accepted."""
    for _, group, test in published():
        if group["operation"] != operation or test["result"] != "valid":
            continue
        p, given = parameters_of(decoded(group["parameters"])), decoded(test)
        right = ITEMS[operation](given["inputs"], p) if operation in ITEMS else run_numpy(operation, given, p)
        for name in given["expected"]:
            # A choice inside its bound may fall either way, and prefill's bounded results are read from its record.
            if name in given.get("bounded", []) and (name in ("intra", "cross") or operation == "prefill"):
                continue
            wrong = spoiled(right[name])
            if wrong is not None:
                found = list(complaints({**right, name: wrong}, given, operation, p, "float64"))
                assert found, (test["tcId"], name)


def run_numpy(operation: str, given: Any, p: CrystalCacheParameters) -> Mapping[str, Any]:
    return STAGE_RUNS[operation](resolve("numpy"), given["inputs"], p)


def spoiled(value: Any) -> Any:
    """The value with its first number moved, or a longer text; None where it has no number."""
    if isinstance(value, str):
        return value + "0"
    if isinstance(value, list) and value and isinstance(value[0], list):
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


def test_a_score_that_is_not_given_stays_nan() -> None:
    (nan,) = plain_score([0.5], [float("nan")], 1.0)
    assert nan != nan
