"""Tests of the promises of policies: true promises hold, and each false promise fails in its column.

Further tests run `kvspec verify --policy`.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvspec
from conformance.checks.promises import FAR, PROPERTIES, promised
from conformance.paths import ROOT, SPEC
from conformance.policy_suite import test_promises
from conformance.strategies.policy_inputs import decided, drawn, named
from conformance.verify import __main__ as verify_main
from conformance.verify.page import markdown, page
from reference.policies import knorm, policy_from_score, with_adaptive_budgets
from reference.policies.budgets import even
from reference.policies.names import POLICIES
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, Needs, Observation, Policy, Promises
from spec.retention import Granularity
from tests.conformance.test_plugin import run
from tests.spec.test_policy_table import PAGE

pytestmark = pytest.mark.law("the-proof-has-teeth")


Array = np.ndarray[Any, Any]
ALL = Promises(*["yes"] * len(PROPERTIES))  # type: ignore[arg-type]


def value_norm(seen: Observation) -> Array:
    return np.concatenate([np.linalg.norm(np.asarray(view.v), axis=2) for view in seen.layers.values()])


def rarest(seen: Observation) -> Array:
    """Return one row of scores from the layer before the last one and the ids."""
    (view,) = seen.layers.values()
    assert seen.token_ids is not None
    norms: Array = np.linalg.norm(view.k, axis=2).sum(axis=0, keepdims=True)
    return norms / np.bincount(seen.token_ids)[seen.token_ids]


VALUE_NORM = policy_from_score(value_norm, needs=Needs("all", values=True), protection=SinkAndRecent(1, 2))
TRUE = {
    "head": VALUE_NORM, "pure positions": policy_from_score(
        lambda seen: -np.arange(float(seen.seen))[None], needs=Needs(), granularity=Granularity.MODEL
    ),
    "one layer": policy_from_score(
        rarest, needs=Needs("observed", observed=-2, token_ids=True), granularity=Granularity.MODEL
    ),
}


def judge(column: str, policy: Policy) -> None:
    test_promises.test_a_promise_holds(column, lambda inputs: policy)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
@pytest.mark.usefixtures("sparing")
@pytest.mark.parametrize("name", TRUE)
@pytest.mark.parametrize("column", PROPERTIES)
def test_a_true_promise_holds(name: str, column: str) -> None:
    judge(column, replace(TRUE[name], promises=ALL))


def scored(change: Any) -> Policy:
    return policy_from_score(lambda seen: change(seen, value_norm(seen)))


def false_promises() -> Iterator[tuple[str, Policy]]:
    """Yield a policy that breaks each column."""
    # The second call reads a different sequence, the third repeats the first, and a last call reports the kept set.
    turns = cycle((1, 1, -1, 1))

    def blind(scores: Any, budgets: Any, protected: Any, /) -> Any:
        return top_units(replace(scores, values=np.nan_to_num(scores.values)), budgets, protected & False)

    def worst(scores: Any, budgets: Any, protected: Any, /) -> Any:
        return top_units(replace(scores, values=-scores.values), budgets, protected)

    def fewer(total: int, scores: Any, /) -> Any:
        return even(total, scores) - 1

    def by_head(seen: Observation, actual: Array) -> Array:
        return actual * np.where(np.arange(len(actual)) % 2, 1, -1)[:, None]

    def by_group(seen: Observation, actual: Array) -> Array:
        view = seen.layers[0]
        return actual if len(view.q) == len(view.k) else -actual

    def moved(total: int, scores: Any, /) -> Any:
        shares = even(total, scores)
        if len(shares) > 1 and np.nanmin(scores.values) > FAR and 0 < shares[0] < scores.values.shape[1]:
            shares[:2] += [1, -1]
        return shares

    def far(seen: Observation, actual: Array) -> Array:
        view = seen.layers[0]
        return actual + 2 * FAR * (len(view.q) > len(view.k))

    yield "budget exact", replace(VALUE_NORM, budgets=fewer, protection=SinkAndRecent(0, 0))
    yield "protection holds", replace(VALUE_NORM, selector=blind)
    yield "no-op at full budget", replace(VALUE_NORM, budgets=fewer, protection=SinkAndRecent(0, 0))
    yield "higher score never loses", replace(VALUE_NORM, selector=worst)
    yield "row independence", scored(lambda seen, actual: next(turns) * actual)
    yield "head permutation", scored(by_head)
    yield "GQA", scored(by_group)
    yield "GQA", replace(scored(far), budgets=moved)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize(("column", "policy"), list(false_promises()))
def test_a_false_promise_dies_by_its_column_with_a_small_input(column: str, policy: Policy) -> None:
    with pytest.raises(AssertionError, match=rf"^{column}: not so with \d tokens, B = \d, layers x KV") as died:
        judge(column, replace(policy, promises=ALL))
    layers, heads = re.findall(r"= (\d) x (\d)", str(died.value))[0]
    assert int(layers) * int(heads) <= 3


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_a_promise_that_only_a_models_sizes_break_dies() -> None:
    """Drawn inputs of this policy have fewer tokens, fewer KV heads and narrower heads."""
    def fewer(total: int, scores: Any, /) -> Any:
        return even(total, scores) - (scores.values.shape[1] >= 256)

    with pytest.raises(AssertionError, match=(
        r"budget exact: not so with 300 tokens, B = 121, layers x KV heads = 1 x 8: 960 tokens are kept in place of 968"
        r" = 8 sets x 121\n.* keeps 120, 120, "
    )):
        judge("budget exact", replace(VALUE_NORM, budgets=fewer, promises=ALL))


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize("largest", [1.0, 2.0**20, 2.0**-30])
@pytest.mark.parametrize(("units", "holds"), [(64, True), (65, False)])
def test_repeated_query_heads_exchange_tokens_of_one_score_up_to_rounding(
    largest: float, units: int, holds: bool,
) -> None:
    """Check two scores that differ by `units` in the last place, and exchange places when heads are repeated."""
    def near(seen: Observation) -> Array:
        (view,) = seen.layers.values()
        apart = units * np.finfo(np.float64).eps * largest
        actual = np.full((1, seen.seen), largest - 2 * apart)
        actual[0, :2] = (largest, largest - apart)[:: 1 if len(view.q) == len(view.k) else -1]
        return actual

    case = test_promises.Subject(lambda inputs: policy_from_score(near))
    problem = PROPERTIES["GQA"].problem(case, drawn(1, 5, 1, (1, 1)), 1, 0)
    assert problem == ("" if holds else "with each query head twice, kept set 0 of 1 keeps [1] in place of [0]")


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize("column", PROPERTIES)
def test_what_is_not_promised_is_said(column: str) -> None:
    """Hypothesis adds the example to the matched text."""
    with pytest.raises(pytest.skip.Exception, match=rf"^{column}: not promised(\n|$)"):
        judge(column, knorm())
    with pytest.raises(pytest.skip.Exception, match=rf"^{column}: N/A(\n|$)"):
        judge(column, replace(knorm(), promises=Promises(*["N/A"] * len(PROPERTIES))))  # type: ignore[arg-type]


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_to_protect_nothing_is_no_protection_that_holds() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^protection holds: N/A, for no token is protected(\n|$)"):
        judge("protection holds", replace(knorm(), promises=ALL))


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_a_policy_that_fails_otherwise_does_not_pass() -> None:
    with pytest.raises(SpecError, match="is used by the scorer, but not declared"):
        judge("GQA", replace(policy_from_score(value_norm, needs=Needs("all")), promises=ALL))


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_a_promise_is_of_one_composition() -> None:
    assert VALUE_NORM.promises.higher_score_never_loses == "yes"
    assert with_adaptive_budgets(VALUE_NORM).promises == NOTHING_PROMISED
    with pytest.raises(SpecError, match="gqa = 'perhaps': must be one of yes, no, N/A"):
        Promises(gqa="perhaps")  # type: ignore[arg-type]


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("PO-RETAIN")
def test_the_suite_runs_from_outside_the_tree(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.partition("RIGHT = replace")[0], "utf-8")
    suite = ["--pyargs", "conformance.policy_suite"]
    result = run(tmp_path, *suite, "--kvspec-policy", "mine:RIGHT")
    assert "4 passed, 3 skipped" in result.stdout, result.stdout
    assert "GQA: not promised" in result.stdout
    assert "no tests ran" in run(tmp_path, *suite).stdout
    result = run(tmp_path, *suite, "--kvspec-policy", "mine:RIGHT", "--kvspec-as", "knorm", "--kvspec-profile", "few")
    assert result.returncode == 1
    assert "FAILED" in result.stdout
    assert "::test_the_kept_sets_are_those_of_the_method[knorm]" in result.stdout


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
KNORM = policy_from_score(
    lambda seen: -np.concatenate([np.linalg.norm(view.k, axis=2) for view in seen.layers.values()]), needs=Needs("all")
)
"""
MESSAGES = {
    "budget exact": "pass", "protection holds": "pass", "no-op at full budget": "pass",
    "higher score never loses": "pass", "row independence": "not promised", "head permutation": "not promised",
    "GQA": "N/A",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_seeds: None) -> Path:
    (tmp_path / "promisers.py").write_text(MINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVSPEC_PROFILE", "few")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "promisers", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["verify", *words, "--out", "found"])
    return verify_main.main()


def certificate() -> dict[str, Any]:
    """Return the certificate that was written, checked by its schema."""
    record = tomllib.loads(Path("found/certificate.toml").read_text(encoding="utf-8"))
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(json.loads(json.dumps(record, default=str)))] == []
    return record


def verdicts(record: dict[str, Any]) -> dict[str, str]:
    return {row: outcome["verdict"] for row, outcome in record["items"].items()}


def test_a_right_policy_is_certified_for_what_it_promises_and_the_check_notices_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--policy", "promisers:KNORM", "--as", "knorm") == 0
    assert "promisers:KNORM conforms to knorm and keeps its 3 promises" in capsys.readouterr().out
    record = certificate()
    assert (record["verdict"], record["judged"], record["run"]["methods"], record["items"]["PO-KNORM"]["verdict"]) == (
        "certified", "the equations of methods, and its promises", ["knorm"], "pass",
    )
    assert "conforms to knorm" in (folder / "found/badge.svg").read_text(encoding="utf-8")
    assert asked(monkeypatch, "--policy", "promisers:RIGHT", "--force") == 0
    outcome, shown = "promisers:RIGHT keeps its 4 promises; not compared with any method", capsys.readouterr().out
    assert outcome in shown
    assert "properties that the policy promises and keeps: budget exact, " in shown
    assert "properties that the policy does not promise, or that do not apply: row independence, " in shown
    assert "a promise does not test the score" in shown
    record = certificate()
    assert (record["verdict"], record["judged"]) == (
        "keeps its promises", "its promises; not compared with any method",
    )
    assert verdicts(record) == MESSAGES
    assert (record["families"], record["counts"]["examples"]) == (["promises"], 4 * 12)
    for file in ("badge.svg", "certificate.html", "summary.md"):
        assert outcome.partition(" ")[2] in (folder / "found" / file).read_text(encoding="utf-8")
    assert record["subject"].keys() == {"kind", "name", "named", "files", "digest"}
    assert record["subject"]["name"] == "promisers:RIGHT"  # The policy calls itself snapkv.
    assert record["covers"].endswith("4 of 7 rows decided; not promised: row independence, head permutation; N/A: GQA")

    assert asked(monkeypatch, "--check", "found/certificate.toml", "--yes") == 0
    assert "the certificate is true" in capsys.readouterr().out
    text = (folder / "found/certificate.toml").read_text(encoding="utf-8")
    (folder / "other.toml").write_text(text.replace('verdict = "not promised"', 'verdict = "pass"', 1), "utf-8")
    assert asked(monkeypatch, "--check", "other.toml", "--yes") == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "items.row independence.verdict: pass in the certificate, not promised now"
    (folder / "promisers.py").write_text(f"{MINE}\n", encoding="utf-8")
    assert asked(monkeypatch, "--check", "found/certificate.toml", "--yes") == 2
    assert "nothing was run" in capsys.readouterr().err


def test_a_broken_promise_fails_by_its_row_with_a_small_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, "--policy", "promisers:WRONG") == 1
    printed, record = capsys.readouterr().out, certificate()
    assert verdicts(record) == {**MESSAGES, "higher score never loses": "fail"}
    row = record["items"]["higher score never loses"]
    assert row["repeat"] == (
        f"kvspec verify --policy promisers:WRONG --profile few --seed {record['run']['seed']}"
        " -- 'test_promises.py::test_a_promise_holds[higher score never loses]'"
    )
    assert row["found"].startswith("higher score never loses: not so with ")
    for line in (*row["input"].splitlines(), *row["found"].splitlines()):
        assert line in printed  # No value is cut.
    assert re.search(r"keeps token \d+ with the score [\d.]+, and kept set 0 evicts token \d+ with ", row["found"])
    again: dict[str, Any] = {}
    exec(row["input"], again)
    kept = decided(named("promisers:WRONG", again["inputs"]), again["inputs"], again["B"])
    assert f"worst keeps {kept}" in row["found"]
    assert "higher score never loses" in (folder / "found/certificate.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("policy", "method", "code", "summary"),
    [("WRONG", "", 1, "does not keep its promises"), ("KNORM", "snap", 2, "")],
)
def test_the_steps_of_the_action_show_the_verdict(
    folder: Path, policy: str, method: str, code: int, summary: str,
) -> None:
    """Run the steps without the installation. An executable starts this tree instead."""
    action = pytest.importorskip("yaml").safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    given = {"policy": f"promisers:{policy}", "as": method, "quick": "true"}
    inputs = {name: given.get(name, one.get("default", "")) for name, one in action["inputs"].items()}
    (step,) = (one for one in action["runs"]["steps"] if one["name"] == "Verify")
    environment = {name: inputs[value.strip("${ }").removeprefix("inputs.")] for name, value in step["env"].items()}
    (folder / "kvspec").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvspec "$@"\n', "utf-8")
    (folder / "kvspec").chmod(0o755)
    (folder / "summary").touch()
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=folder, env={**os.environ, **environment, **paths},
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    printed = (folder / "summary").read_text(encoding="utf-8")
    assert summary in printed
    assert bool(printed) == (code < 2)


@pytest.mark.law("as-it-is-described")
def test_our_own_policies_promise_what_the_page_says() -> None:
    """H2O and VATP promise less, because the suite cannot see the protection of their newest half."""
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
    """Check a subject that this process finds, but that is not in the current folder."""
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    right = kvspec.verify(policy="promisers:RIGHT", quick=True, out="found")
    assert right.passed
    assert right.failing == ()
    assert right.headline.startswith("promisers:RIGHT keeps its 4 promises")
    assert [path.name for path in right.files] == ["quick.toml", "summary.md", "junit.xml", "log.txt"]
    assert tomllib.loads(right.files[0].read_text("utf-8")) == right.certificate
    seeded: dict[str, Any] = {"quick": True, "seed": 7, "out": "found"}
    other = kvspec.verify(policy="promisers:RIGHT", method="streamingllm", fail_fast=True, **seeded)
    assert other.failing == ("PO-STREAMINGLLM",)
    assert other.headline == "promisers:RIGHT does not conform to streamingllm(N_sink=4): PO-STREAMINGLLM fails"
    assert other.certificate["run"]["methods"] == ["streamingllm(N_sink=4)"]
    assert "repeat  kvspec verify --policy promisers:RIGHT --profile few --seed 7 --as streamingllm" in str(other)
    wrong = kvspec.verify(policy="promisers:WRONG", **seeded)
    assert not wrong.passed
    assert wrong.failing == ("higher score never loses",)
    assert wrong.certificate["run"]["seed"] == 7
    assert capsys.readouterr().out == ""
    assert "repeat  kvspec verify --policy promisers:WRONG --profile few --seed 7" in str(wrong)
    assert str(wrong).endswith(wrong.headline)


NASTY = "<img src=x> a|b **c** [d](e) `f`\n# g"


def test_names_that_a_subject_chose_are_text_in_the_summary_and_on_the_page() -> None:
    row = {
        "verdict": "fail", "families": [NASTY], "failed": 1, "passed": 0, "tests": 1, "examples": 1, "test": "t.py::t",
        "input": "", "found": NASTY, "repeat": "```", "excepted": 0,
    }
    record = {
        "verdict": "rejected", "judged": "x", "covers": NASTY, "date": "", "kvspec": "", "spec": "0",
        "families": [NASTY],
        "subject": {"kind": "command", "name": NASTY, "named": NASTY}, "run": {}, "device": {}, "items": {NASTY: row},
        "counts": {"failed": 1}, "failing": [NASTY], "undecided": [], "vectors": {}, "exception": [],
        "unneeded_exceptions": [],
    }
    text, html = "\n".join(markdown(record)), page(record)
    assert "<img" not in text.replace("```text\n<img src=x> a|b **c** [d](e) `f`\n# g", "")
    assert text.startswith(r"**kvspec: &lt;img src=x\> a\|b \*\*c\*\* \[d\](e) \`f\` \# g does not conform")
    assert text.count("```") == 2
    assert "<img" not in html
    assert html.count("&lt;img src=x&gt;") >= 6
