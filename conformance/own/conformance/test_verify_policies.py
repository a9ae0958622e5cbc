"""`kvspec verify --policy`: a broken promise fails by its row, what is not promised is no pass, a check notices."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvspec
from conformance.checks.promises import PROPERTIES, promised
from conformance.own.spec.test_policy_table import PAGE
from conformance.paths import ROOT, SPEC
from conformance.strategies.policy_inputs import drawn, named
from conformance.verify import __main__ as door
from reference.policies.names import POLICIES
from spec.errors import SpecError

pytestmark = pytest.mark.law("the-proof-has-teeth")

MINE = """
from dataclasses import replace
import numpy as np
from reference.policies import policy_from_score
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from spec.policy import Needs

def value_norm(observation):
    return np.concatenate([np.linalg.norm(view.v, axis=2) for view in observation.layers.values()])

def worst(scores, budgets, protected, /):
    return top_units(replace(scores, values=-scores.values), budgets, protected)

RIGHT = policy_from_score(value_norm, needs=Needs("all", values=True), protection=SinkAndRecent(1, 2))
RIGHT = replace(RIGHT, name="snapkv", promises=replace(RIGHT.promises, gqa="N/A"))
WRONG = replace(RIGHT, name="worst", selector=worst)
"""
SAID = {
    "budget exact": "pass", "protection holds": "pass", "no-op at full budget": "pass",
    "higher score never loses": "pass", "row independence": "not promised", "head permutation": "not promised",
    "GQA": "N/A",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "promisers.py").write_text(MINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVSPEC_PROFILE", "few")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "promisers", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["verify", *words, "--out", "found"])
    return door.main()


def certificate() -> dict[str, Any]:
    """The one that was written; it is of its schema."""
    made = tomllib.loads(Path("found/certificate.toml").read_text(encoding="utf-8"))
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(json.loads(json.dumps(made, default=str)))] == []
    return made


def verdicts(made: dict[str, Any]) -> dict[str, str]:
    return {row: said["verdict"] for row, said in made["items"].items()}


def test_a_right_policy_is_certified_for_what_it_promises_and_the_check_notices_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--policy", "promisers:RIGHT") == 0
    said = "promisers:RIGHT keeps its promises (4 of 7); not compared with any method"
    shown = capsys.readouterr().out
    assert said in shown
    assert "a promise does not test the score" in shown
    made = certificate()
    assert (made["verdict"], made["judged"]) == (
        "keeps its promises", "its promises; not compared with any method",
    )
    assert verdicts(made) == SAID
    assert (made["families"], made["counts"]["examples"]) == (["promises"], 4 * 12)
    for file in ("badge.svg", "certificate.html", "summary.md"):
        assert said.partition(" ")[2] in (folder / "found" / file).read_text(encoding="utf-8")
    assert made["subject"].keys() == {"kind", "name", "named", "files", "digest"}

    text = (folder / "found/certificate.toml").read_text(encoding="utf-8")
    (folder / "other.toml").write_text(text.replace('verdict = "not promised"', 'verdict = "pass"', 1), "utf-8")
    assert asked(monkeypatch, "--check", "other.toml", "--yes") == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "items.row independence.verdict: pass in the certificate, not promised now"
    (folder / "promisers.py").write_text(f"{MINE}\n", encoding="utf-8")
    assert asked(monkeypatch, "--check", "found/certificate.toml", "--yes") == 1
    assert "nothing was run" in capsys.readouterr().out


def test_a_broken_promise_fails_by_its_row_with_a_small_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--policy", "promisers:WRONG") == 1
    said, made = capsys.readouterr().out, certificate()
    assert verdicts(made) == {**SAID, "higher score never loses": "fail"}
    row = made["items"]["higher score never loses"]
    assert row["repeat"] == (
        f"kvspec verify --policy promisers:WRONG --profile few --seed {made['run']['seed']}"
        " -- 'test_promises.py::test_a_promise_holds[higher score never loses]'"
    )
    assert "Draw(" in row["input"]
    assert row["found"].startswith("higher score never loses: not so with ")
    assert row["found"][:100] in said
    assert "higher score never loses" in (folder / "found/certificate.html").read_text(encoding="utf-8")


@pytest.mark.law("as-it-is-described")
def test_our_own_policies_promise_what_the_page_says() -> None:
    """H2O and VATP promise less: their newest half is no protection that the suite could see."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    table = {cells[0]: [cell.partition(":")[0] for cell in cells[1:]] for cells in lines if len(cells) == 8}
    assert table.pop("policy") == list(PROPERTIES)
    there = {name: [promised(named(name, drawn(0)), column) for column in PROPERTIES] for name in POLICIES}
    different = {name for name in there if there[name] != table.get(name)}
    assert different == {"h2o", "vatp", "crystalcache", "fullcache"}
    assert there["vatp"] == ["yes", "yes", "yes", "no", "yes", "yes", "yes"]
    assert there["h2o"] == ["yes", "N/A", "yes", "no", "yes", "yes", "yes"]


def test_the_function_returns_what_the_command_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """The subject is where this process finds it, which is not the current folder."""
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    right = kvspec.verify(policy="promisers:RIGHT", quick=True, out="found")
    assert right.passed
    assert right.failing == ()
    assert right.headline.startswith("promisers:RIGHT keeps its promises")
    assert [path.name for path in right.files] == ["quick.toml", "summary.md", "junit.xml", "log.txt"]
    assert tomllib.loads(right.files[0].read_text("utf-8")) == right.certificate
    wrong = kvspec.verify(policy="promisers:WRONG", quick=True, seed=7, out="found")
    assert not wrong.passed
    assert wrong.failing == ("higher score never loses",)
    assert wrong.certificate["run"]["seed"] == 7
    assert capsys.readouterr().out == ""
    assert "repeat  kvspec verify --policy promisers:WRONG --profile few --seed 7" in str(wrong)
    assert str(wrong).endswith(wrong.headline)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "verify = None: give exactly one of backend, command, policy, cache"),
        ({"policy": "snapkv", "backend": "numpy"}, "give exactly one of"),
        ({"backend": "numpy", "precision": "float16"}, "precision = 'float16': must be one of float64, float32"),
        ({"policy": "snapkv", "profile": "fast"}, "profile = 'fast': must be one of few"),
        ({"policy": "snapkv", "seed": "7"}, "seed = '7': must be a number"),
        ({"policy": "snapkv", "timeout": 3.0}, "timeout = 3.0: is for --command"),
        ({"policy": "nothing:HERE"}, "nothing:HERE"),
    ],
)
def test_the_function_raises_for_wrong_options(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        kvspec.verify(**options, out=tmp_path)
