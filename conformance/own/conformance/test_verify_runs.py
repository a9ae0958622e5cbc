"""`kvspec verify` from its options to its exit code, on a suite of a few tests and engines with a mistake each."""

import sys
import tomllib
from pathlib import Path

import pytest

from conformance.paths import ROOT
from conformance.verify import __main__ as door
from conformance.verify import runs

pytestmark = pytest.mark.law("figures-are-counted-right")

ENGINES = """
import os
from dataclasses import replace
from unittest import SkipTest
from reference.backend import BACKEND

class LaterGain(type(BACKEND.crystal)):
    def score(self, D, impact, protected, parameters, /):
        return super().score(D, impact, protected, replace(parameters, alpha=2 * parameters.alpha))

class Death(type(BACKEND.crystal)):
    def score(self, *given):
        os._exit(3)

class Shy(type(BACKEND.crystal)):
    def score(self, D, *given):
        if len(D) > 3:
            raise SkipTest("backend 'x' has no stage family 'crystal'")
        return super().score(D, *given)

NONE = dict.fromkeys(("breath", "diversity", "nestedkv", "policies"))
WRONG, DEAD, SHY, RIGHT = (
    replace(BACKEND, name=kind.__name__, crystal=kind(), **NONE)
    for kind in (LaterGain, Death, Shy, type(BACKEND.crystal))
)
"""
SUITE = """
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.suite.test_diversity import test_larger_sets_are_those_of_algorithm_1
from conformance.suite.test_score import test_the_score_equals_the_brute_force

@pytest.mark.spec("CC-COUNT")
@given(x=st.integers(0, 2**40))
def test_draws(judged, x):
    with Path("draws.txt").open("a") as file:
        file.write(f"{x}\\\\n")

@pytest.mark.spec("CC-CUT")
@pytest.mark.parametrize("case", ["a", "b"])
def test_known(judged, case):
    assert case == "a"

@pytest.fixture
def broken():
    yield
    raise ValueError("afterwards")

@pytest.mark.spec("CC-MERGE")
def test_that_breaks_afterwards(judged, broken):
    pass
"""
KNOWN = """
[[exception]]
{grain} = "{subject}"
kind = "xfail"
reason = "known"
issue = "https://example.org/7"
expiry = 2999-01-01
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with engines, in which a suite of its own is run with few examples."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/test_tiny.py").write_text(SUITE.replace("\\\\n", "\\n"), encoding="utf-8")
    (tmp_path / "suite/test_scale_tiny.py").write_text("def test_wide(judged):\n    assert False\n", encoding="utf-8")
    (tmp_path / "engines.py").write_text(ENGINES, encoding="utf-8")
    for subject, grain in (("CC-CUT", "item"), ("test_tiny.py::test_known[c]", "test")):
        (tmp_path / f"{grain}.toml").write_text(KNOWN.format(grain=grain, subject=subject), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVSPEC_PROFILE", "few")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")  # the user's own, which are not for this
    monkeypatch.setattr(runs, "SUITE", tmp_path / "suite")
    monkeypatch.setattr(runs, "SCALE", tmp_path / "suite/test_scale_*.py")
    monkeypatch.setattr("conformance.verify.runs.SUITE", tmp_path / "suite")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engines", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["verify", *words])
    return door.main()


def test_a_wrong_engine_s_certificate_names_the_item_and_can_be_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--backend", "engines:WRONG", "--exceptions", "item.toml", "--out", "found") == 1
    said, first = capsys.readouterr().out, (folder / "draws.txt").read_text(encoding="utf-8")
    made = tomllib.loads((folder / "found/certificate.toml").read_text(encoding="utf-8"))
    verdicts = {item: row["verdict"] for item, row in made["items"].items() if row["verdict"] != "not run"}
    assert verdicts == {
        "CC-SCORE": "fail", "CC-NORMALISED-IMPACT": "fail", "CC-COUNT": "pass", "CC-CUT": "excepted",
        "CC-MERGE": "fail", "DV-GREEDY": "not offered", "DV-COSINE": "not offered",
    }
    assert made["items"]["CC-COUNT"]["examples"] == len(first.splitlines()) == 12
    row = made["items"]["CC-SCORE"]
    assert row["repeat"] == (
        f"kvspec verify --backend engines:WRONG --profile few --seed {made['run']['seed']}"
        " -- test_tiny.py::test_the_score_equals_the_brute_force"
    )
    assert "case=Case(" in row["input"]
    assert row["input"].splitlines()[1] in said
    assert made["items"]["CC-MERGE"]["found"] == "ValueError: afterwards"
    assert {path.name for path in (folder / "found").iterdir()} == {
        "certificate.toml", "certificate.html", "badge.svg", "summary.md", "junit.xml", "log.txt",
    }

    assert asked(monkeypatch, "--check", "found/certificate.toml", "--out", "again", "--yes") == 0
    said = capsys.readouterr().out
    assert "the certificate is true" in said
    assert "the same with the seed of the certificate; now with --seed" in said
    draws = (folder / "draws.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(draws[:24]) == 2 * first
    assert "".join(draws[24:]) != first

    (folder / "engines.py").write_text(f"{ENGINES}\n", encoding="utf-8")
    assert asked(monkeypatch, "--check", "found/certificate.toml", "--out", "again", "--yes") == 1
    assert "nothing was run" in capsys.readouterr().out


def test_an_engine_that_ends_the_process_fails_the_item_that_it_ended_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--backend", "engines:DEAD", "--out", "found") == 1
    assert "the process ended with 3 in this test" in capsys.readouterr().out


def test_an_engine_that_skips_its_own_tests_fails_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """By the words in which the suite itself skips what is not offered."""
    assert asked(monkeypatch, "--backend", "engines:SHY", "--out", "found", "--fail-fast", "--quick") == 1
    said = capsys.readouterr().out
    assert "CC-SCORE fails" in said
    assert f"crystal.score raised SkipTest at {folder}/engines.py:" in said
    made = tomllib.loads((folder / "found/quick.toml").read_text(encoding="utf-8"))
    assert made["items"]["CC-SCORE"]["verdict"] == "fail"
    assert made["counts"]["not_run"] > 0


def test_a_quick_run_leaves_full_sizes_out_and_certifies_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """With a seed, other examples; the tiny suite decides few items, so that the exit code is 1."""
    assert asked(monkeypatch, "--backend", "engines:RIGHT", "--quick", "--seed", "7", "--exceptions", "item.toml") == 1
    said = capsys.readouterr().out
    assert "this is no certificate" in said
    assert "CC-MERGE fails" in said
    assert "test_wide" not in Path("results/verify/log.txt").read_text(encoding="utf-8")
    assert {path.name for path in Path("results/verify").iterdir()} == {
        "log.txt", "quick.toml", "summary.md", "junit.xml",
    }
    drawn = Path("draws.txt").read_text(encoding="utf-8")
    Path("draws.txt").unlink()
    assert asked(monkeypatch, "--backend", "engines:RIGHT", "--profile", "few", "--", "-k", "draws") == 0
    assert Path("draws.txt").read_text(encoding="utf-8") != drawn


@pytest.mark.law("one-line-with-the-way-out")
def test_an_exception_for_a_case_that_is_not_there_ends_the_run_before_its_tests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--backend", "engines:RIGHT", "--exceptions", "test.toml") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "unknown test 'test_tiny.py::test_known[c]'" in said
    assert not Path("draws.txt").exists()
