"""The published vectors are what the oracles give, and the writer completes drafts and changes no test."""

import inspect
import json
import re
from importlib import import_module
from typing import Any

import pytest

from conformance.assurance.vector_writer import store
from conformance.assurance.vector_writer.brute_force import score as plain_score
from conformance.vectors import files


@pytest.mark.parametrize("stage", files.stages())
def test_a_file_is_what_the_oracles_give(stage: str) -> None:
    built = store.built(stage)
    assert files.stored(stage) == built
    assert files.path_of(stage).read_text(encoding="utf-8") == store.text_of(built) + "\n"


@pytest.mark.parametrize(
    "module",
    [
        "vectors.files", "assurance.vector_writer.brute_force",
        "assurance.vector_writer.operation", "assurance.vector_writer.expected",
        "assurance.vector_writer.expected_decode", "assurance.vector_writer.expected_diversity",
        "assurance.vector_writer.expected_injection", "assurance.vector_writer.expected_nestedkv",
        "assurance.vector_writer.expected_policies",
    ],
)
def test_expected_values_share_nothing_with_what_they_judge(module: str) -> None:
    text = inspect.getsource(import_module(f"conformance.{module}"))
    imported = re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE)
    assert not {"numpy", "reference", "accelerated", "models_integration"} & set(imported)


@pytest.mark.parametrize(
    "module",
    ["assurance.vector_writer.expected_large", "vectors.compact", "strategies.numbers", "checks.scale_checks",
     "oracles.scale.s1", "oracles.scale.stages", "oracles.scale.decode"],
)
def test_what_large_vectors_expect_comes_from_no_implementation(module: str) -> None:
    text = inspect.getsource(import_module(f"conformance.{module}"))
    imported = re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE)
    assert not {"reference", "accelerated", "models_integration"} & set(imported)


def test_a_tcId_stands_once_in_its_file() -> None:
    for stage in files.stages():
        assert store.repeated(files.stored(stage)) == []


@pytest.fixture
def home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of one published file."""
    (tmp_path / "score.json").write_bytes(files.path_of("score").read_bytes())
    monkeypatch.setattr(files, "HOME", tmp_path)
    return tmp_path


def test_the_check_passes(home: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main([]) == 0
    assert "as the oracles have them" in capsys.readouterr().out


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
        ("conformance.assurance.vector_writer", "by hand", "score: header or notes are stale"),
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
    """The file with drafts in its first group."""
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
