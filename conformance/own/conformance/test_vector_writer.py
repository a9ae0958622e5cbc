"""The published vectors are what the cases and the oracles give, and the writer changes none."""

import copy
import inspect
import re
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest

from conformance.assurance.vector_writer import store
from conformance.assurance.vector_writer.brute_force import score as plain_score
from conformance.assurance.vector_writer.cases import STAGES
from conformance.vectors import files

made = lru_cache(store.built)


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracles take seconds for a stage, and give every test the same."""
    monkeypatch.setattr(store, "built", lambda stage: copy.deepcopy(made(stage)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_is_what_the_oracles_give(stage: str) -> None:
    assert files.stored(stage) == store.built(stage)
    assert files.path_of(stage).read_text(encoding="utf-8") == store.text_of(store.built(stage)) + "\n"


@pytest.mark.parametrize(
    "module",
    [
        "vectors.json_values", "assurance.vector_writer.brute_force",
        "assurance.vector_writer.case", "assurance.vector_writer.expected", "assurance.vector_writer.expected_decode",
        "assurance.vector_writer.expected_diversity", "assurance.vector_writer.expected_injection",
        "assurance.vector_writer.expected_nestedkv", "assurance.vector_writer.expected_policies",
    ],
)
def test_expected_values_share_nothing_with_what_they_judge(module: str) -> None:
    text = inspect.getsource(import_module(f"conformance.{module}"))
    imported = re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE)
    assert not {"numpy", "reference", "accelerated", "models_integration"} & set(imported)


@pytest.mark.parametrize(
    "module",
    ["assurance.vector_writer.expected_large", "vectors.compact", "strategies.scale_numbers", "checks.scale_s1",
     "oracles.scale.s1", "oracles.scale.stages", "oracles.scale.decode"],
)
def test_what_large_vectors_expect_comes_from_no_implementation(module: str) -> None:
    text = inspect.getsource(import_module(f"conformance.{module}"))
    imported = re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE)
    assert not {"reference", "accelerated", "models_integration"} & set(imported)


def test_a_tcId_stands_once_in_its_file() -> None:
    for stage in STAGES:
        assert store.repeated(store.built(stage)) == []


def test_the_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main([]) == 0
    assert "as the oracles have them" in capsys.readouterr().out


@pytest.fixture
def home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the published files."""
    for path in files.HOME.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(files, "HOME", tmp_path)
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
        ("conformance.assurance.vector_writer", "by hand", "score: header or notes are stale"),
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


def test_a_score_that_is_not_given_stays_nan() -> None:
    (nan,) = plain_score([0.5], [float("nan")], 1.0)
    assert nan != nan
