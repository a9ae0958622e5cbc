"""A study: rules, parts, stored rows, and estimates and claims compared with counting by hand."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the study drives transformers models")

from typer.testing import CliRunner

from experiments.studies.evidence.claims import verdicts
from experiments.studies.evidence.kept import BLIND, CONTROLS, FULL
from experiments.studies.evidence.measure import measure
from experiments.studies.evidence.rules import PARTS, Claim, Rules, Stage, load_rules
from experiments.studies.evidence.run import methods
from experiments.studies.evidence.samples import Samples
from experiments.studies.evidence.tables import lost_at, swept
from experiments.studies.results import Row, load_rows
from experiments.studies.subject import Loading
from experiments.tasks.needle import part_of
from kvspec.cli.app import app
from lab.measure import repeat
from reference.statistics import mcnemar, mcnemar_power, wilson
from spec.errors import SpecError
from spec.policy import SEGMENT_END
from tests.experiments.studies.experiments import commit_all

pytestmark = pytest.mark.law("figures-are-counted-right")

RULES = """
[[claim]]
name = "the fact is kept"
first = "evidence"
second = "streamingllm"
budget = "0.3"
placement = "after"
tasks = ["needle_in_prose"]
measure = "recovery"
difference = 0.2

[study]
title = "Small"
model = "pocket"
contexts = 4
questions = 1
seed = 3
lengths = [1024]
placements = ["after", "in_prompt"]
tasks = ["needle_in_prose", "prose_continuation"]
policies = ["streamingllm"]
budgets = ["0.3"]
"""


def rules_file(folder: Path, text: str = RULES) -> Path:
    """Write the rules file, and commit it as the only commit of a repository."""
    path = folder / "rules.toml"
    path.write_text(text, encoding="utf-8")
    commit_all(folder)
    return path


def study(folder: Path, part: str) -> Any:
    arguments = ["study", "--rules", str(folder / "rules.toml"), "--out", str(folder), "--part", part]
    return CliRunner().invoke(app, arguments)


def test_a_study_runs_stops_and_goes_on(tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rules_file(tmp_path)
    results = tmp_path / "study.jsonl"
    most = [2]

    def interrupted(*arguments: Any) -> Row:
        if most[0] == 0:
            raise KeyboardInterrupt
        most[0] -= 1
        return measure(*arguments)

    monkeypatch.setattr("experiments.studies.evidence.run.measure", interrupted)
    stopped = study(tmp_path, "confirm")
    assert stopped.exit_code == 130
    assert "run the same command again for the rest" in " ".join(stopped.output.split())
    first = load_rows(results)
    assert len(first) == 2
    monkeypatch.setattr("experiments.studies.evidence.run.measure", measure)
    done = study(tmp_path, "confirm")
    assert done.exit_code == 0, done.output
    assert "2 of them stored" in done.output
    rows = load_rows(results)
    assert rows[:2] == first
    assert len({(row["sample"], row["placement"]) for row in rows}) == len(rows)
    before = results.read_bytes()
    again = study(tmp_path, "confirm")
    assert f"{len(rows)} of them stored" in again.output
    assert results.read_bytes() == before
    check_rows(rows, load_rules(tmp_path / "rules.toml"))
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<strong>the fact is kept</strong>" in written
    assert "evidence over streamingllm: recovery at 0.3" in written
    check_other_code(tmp_path, rows)


def check_other_code(folder: Path, rows: list[Row]) -> None:
    """Check that brute force and masks reproduce the rows.

    These checks must detect a wrong likelihood and a wrong number of kept tokens.
    """
    changes: list[tuple[dict[str, Any], int]] = [({}, 0), ({"likelihood": -9.0}, 1), ({"evidence_kept": -1}, 1)]
    for change, code in changes:
        asked = [row for row in rows if row["evidence_tokens"]]
        changed = [{**row, "cells": [{**cell, **change} for cell in row["cells"]]} for row in asked]
        path = folder / "changed.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in changed), encoding="utf-8")
        assert repeat.main(["--rules", str(folder / "rules.toml"), "--rows", str(path), "--count", "3"]) == code


def check_rows(rows: list[Row], rules: Rules) -> None:
    for row in rows:
        assert row["rules"] == rules.digest
        assert row["part"] == "confirm" == part_of(row["context"])
        assert {"torch", "transformers", "numpy", "python"} == set(row["versions"])
        assert {cell["policy"] for cell in row["cells"]} == {*CONTROLS, *rules.policies}
        asked = row["task"] == "needle_in_prose"
        assert (row["evidence_tokens"] > 0) is asked
        assert all((cell["right"] is not None) is asked for cell in row["cells"])
    assert {row["task"] for row in rows} == set(rules.tasks)


def test_parts_are_disjoint_whole_and_decided_by_the_context(tmp_path: Path) -> None:
    digests = [f"{n:08x}" + "0" * 56 for n in range(5000)]
    by_part = {part: {digest for digest in digests if part_of(digest) == part} for part in PARTS}
    assert set.union(*by_part.values()) == set(digests)
    assert not set.intersection(*by_part.values())
    assert len(by_part["dev"]) == 1000


def test_policies_of_rules_may_have_constants(tmp_path: Path) -> None:
    wider = RULES.replace('["streamingllm"]\nb', '["streamingllm", "streamingllm(N_sink=9)", "tova@prompt", "tova"]\nb')
    subject = Loading(backend="numpy").subject()
    policies = methods(load_rules(rules_file(tmp_path, wider)), subject)
    shown = [method.policy.protection(100)[:10].sum() for method in policies.values()]
    assert shown[:2] == [4, 9]
    assert policies["tova@prompt"].policy.cadence == SEGMENT_END != policies["tova"].policy.cadence


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"recovery"', '"speed"', "recovery, accuracy"), ("0.2\n", "0.0\n", r"must lie in \[-1, 1\] and not be 0"),
        ('second = "streamingllm"', 'second = "snapkv"', "the fact is kept"),
        ('budget = "0.3"', 'budget = "0.4"', "budget"),
        ('placement = "after"', 'placement = "paper"', "placement"), ("contexts = 4", "contexts = 0", "at least 1"),
        ("questions = 1", "questions = 0", "at least 1"), ("[1024]", "[0]", "at least 1"),
        ("contexts = 4", 'contexts = "4"', "must be a whole number: type contexts = 4 "),
        ("[1024]", "1024", r"lengths = 1024: must be a list of"),
        ("contexts = 4", "context = 4", "missing: contexts; unknown: context; did you mean contexts.; the keys are"),
        ('["0.3"]', "[0.3]", r'must be a list of texts in quotes: type budgets = \["0.3"\]'),
        ("[1024]", "[]", "at least one"), ("[study]", "[studies]", "no other table"), ("[[claim]]", "claim", "TOML"),
        ('["0.3"]', '["much"]', "budget"), ('["streamingllm"]\nb', '["stream"]\nb', "streamingllm"),
        ('"prose_continuation"]', '"prose_continuing"]', "did you mean prose_continuation"),
        ('"after", "in_prompt"', '"before"', "placements"), ('["0.3"]', '["1"]', "is one token: write 1.0"),
        ("seed = 3", "seed = 3\nseeds = [3]", "seed or seeds"), ("seed = 3", "seeds = []", "at least one"),
        ('["streamingllm"]\nb', '["crystalcache(stream=true)"]\nb', "evicts while the model reads"),
        ('tasks = ["needle_in_prose"]', 'tasks = ["needle"]', "tasks"),
        ('"prose_continuation"]', '"needle(depth=2, x=1)"]', "has no constant x; the constants are depth"),
        ('"prose_continuation"]', '"needle(depth=\'a\')"]', "must be a number"),
        ('"prose_continuation"]', '"key_value_short_turns"]', "placements = 'in_prompt'"),
        ('["streamingllm"]\nb', '["fullcache"]\nb', "policies"),
        ("[study]", '[[stage]]\nname = "D"\npolicy = "snapkv"\n[study]', "stage 'D': policy"),
        ('["streamingllm"]\nb', '["streamingllm(N=1)"]\nb', "N = 1: streamingllm has the constants N_sink"),
        ("contexts = 4", "contexts = nan", "contexts = nan: must be a whole number: type contexts = 3 "),
        ("contexts = 4", "contexts = true", "must be a whole number: type contexts = 3 "),
        ("contexts = 4", "contexts = 4\nbare = 1", "must be true or false: type bare = true "),
        ("contexts = 4", "contexts = 4\ncommit = 3", "unknown: commit"),
        ("contexts = 4", "contexts = 4\nanswer_tokens = -1", "answer_tokens = -1: must be at least 1, or 0"),
        ("title =", "title = 4 #", 'must be text in quotes: type title = "4" '),
        ("difference = 0.2", 'difference = "0.2"', "must be a number: type difference = 0.2 "),
        ("difference = 0.2", "difference = nan", "must lie in"),
        ("difference = 0.2", "difference = true", "must be a number: type difference = 0.1 "),
        ("[1024]", "[1024, 1024]", "lengths = 1024: is given twice: leave out one of the two "),
        ('["0.3"]', '["0.3", "0.3"]', "budgets = '0.3': is given twice: leave out one of the two "),
        ('["streamingllm"]\nb', '["streamingllm", "streamingllm"]\nb', "policies = 'streamingllm': is given twice"),
        ('tasks = ["needle_in_prose"]', "tasks = []", "tasks = .*: must have at least one"),
        ("seed = 3", "seed = true", r"seeds = \[True\]: must be a list of integers: type seeds = \[3\] "),
        ("[[claim]]", "[claim]", r"claim = .* must be a list of tables: type \[\[claim\]\]"),
        ("[[claim]]", "stage = [[1]]\n[[claim]]", r"stage = \[\[1\]\]: must be a list of tables: type \[\[stage\]\]"),
        ("[study]", "[[study]]", r"study = .* must be a table: type \[study\]"),
    ],
)
def test_rules_are_refused_by_name(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in RULES
    with pytest.raises(SpecError, match=words) as refused:
        load_rules(rules_file(tmp_path, RULES.replace(old, new, 1)))
    assert str(tmp_path) in str(refused.value)
    with pytest.raises(SpecError, match="cannot be read"):
        load_rules(tmp_path / "nowhere.toml")


@pytest.mark.law("as-it-is-described")
def test_a_rules_file_of_windows_has_the_same_rules(tmp_path: Path) -> None:
    """Editors of Windows write a byte order mark and other ends of lines. The digest is that of the bytes."""
    plain, path = load_rules(rules_file(tmp_path, RULES)), tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + RULES.replace("\n", "\r\n").encode())
    rules = load_rules(path)
    assert replace(rules, digest=plain.digest, source=plain.source) == plain
    assert rules.digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('["streamingllm"]\nb', '["streamingllm", "triattention"]\nb', "by triattention: run `kvspec calibrate"),
        ('["streamingllm"]\nb', '["streamingllm", "knorm@prompt"]\nb', "always evicts only after the prompt"),
        ("contexts = 4", "contexts = 4000", "windows"),

        ('"prose_continuation"]', '"needle(depth=2)"]', "depth = 2: must lie in [0, 1]"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_row(tmp_path: Path, old: str, new: str, words: str) -> None:
    rules_file(tmp_path, RULES.replace(old, new, 1))
    refused = study(tmp_path, "dev")
    assert isinstance(refused.exception, SpecError)
    assert words in str(refused.exception)
    assert not (tmp_path / "study.jsonl").exists()


def rows_of(values: list[tuple[str, float, float, float, bool, bool]], part: str = "confirm") -> list[Row]:
    """Return rows from context, log-likelihoods of a, of b and without context, and whether a and b are right.

    The log-likelihood of the full cache is 0.
    """
    actual = []
    for at, (context, a, b, blind, a_right, b_right) in enumerate(values):
        cells = {
            (FULL, "1.0"): (0.0, True, 100.0), (BLIND, "0"): (blind, False, 2.0), ("snapkv", "0.3"): (a, a_right, 30.0),
            ("knorm", "0.3"): (b, b_right, 30.2),
        }
        actual.append({
            "context": context, "task": "needle_in_prose", "length": 100, "placement": "after", "part": part,
            "sample": str(at), "metadata": {}, "evidence_tokens": 4, "answer_tokens": 2, "model": "m",
            "backend": "numpy",
            "cells": [
                {
                    "policy": policy, "budget": budget, "likelihood": likelihood, "right": right, "kept": cache,
                    "mean_cache": cache + 20 * right,
                    "evidence_kept": [1, 3] if policy == "snapkv" else 2, "divergence": 0.5, "lost_attention": 0.25,
                }
                for (policy, budget), (likelihood, right, cache) in cells.items()
            ],
        })
    return actual


VALUES = [
    ("x", -1.0, -2.0, -10.0, True, False), ("x", -3.0, -4.0, -8.0, True, True), ("y", -5.0, -5.5, -6.0, False, False),
    ("z", -2.0, -7.0, -9.0, True, False), ("w", -1.0, -3.0, -12.0, True, False), ("v", -2.0, -2.5, -7.0, True, True),
]
A, B = ("snapkv", "0.3"), ("knorm", "0.3")


def test_estimates_are_those_by_hand() -> None:
    samples = Samples(rows_of(VALUES))
    gaps = [-blind for *_, blind, _, _ in VALUES]
    recovery = samples.recovery(A)
    assert recovery.value == pytest.approx(sum(a - blind for _, a, _, blind, *_ in VALUES) / sum(gaps))
    assert recovery.low < recovery.value < recovery.high
    assert samples.recovery((FULL, "1.0")).value == 1.0
    assert samples.recovery((BLIND, "0")).value == 0.0
    assert samples.accuracy(A)[:3] == (5 / 6, *wilson(5, 6))
    assert samples.survival(A).value == samples.survival(B).value == 0.5
    assert samples.worth().value == pytest.approx(sum(gaps) / 6)
    assert samples.share(A) == pytest.approx((30 + 20 * 5 / 6) / 120)


def test_what_the_full_cache_cannot_do_has_no_accuracy_and_a_worthless_context_no_recovery() -> None:
    rows = rows_of(VALUES)
    for row in rows[:3]:
        row["cells"][0]["right"] = False
    assert Samples(rows).accuracy(A).n == 0
    values = [(context, -1.0, -1.0, 0.5 * (-1) ** at, True, True) for at, (context, *_) in enumerate(VALUES)]
    assert math.isnan(Samples(rows_of(values)).recovery(A).value)


def test_one_context_has_no_interval() -> None:
    alone = Samples(rows_of(VALUES[:2]))
    assert alone.worth()[::3] == (9.0, 2)
    assert math.isnan(alone.worth().low)
    assert not alone.recovery(A).known
    (verdict,) = verdicts([claim("recovery")], alone, alone)
    assert verdict.flag == "the context is not clearly worth anything"


def claim(measure: str, **changed: Any) -> Claim:
    given = {
        "name": measure, "first": "snapkv", "second": "knorm", "budget": "0.3", "placement": "after",
        "tasks": ("needle_in_prose",), "measure": measure, "difference": 0.3,
    }
    return Claim(**{**given, **changed})


def test_claims_by_hand() -> None:
    dev, confirm = Samples(rows_of(VALUES, "dev")), Samples(rows_of(VALUES))
    accuracy, recovery = verdicts([claim("accuracy"), claim("recovery")], dev, confirm)
    assert accuracy.p == mcnemar(0, 3)
    assert accuracy.difference.value == pytest.approx(3 / 6)
    assert accuracy.power == pytest.approx(mcnemar_power(6, 0.5, 0.3, 0.025))
    assert accuracy.kind == "exploratory"  # No row names the commit of its rules.
    registered = Samples([{**row, "commit": "c"} for row in confirm.rows])
    assert {one.kind for one in verdicts([claim("accuracy"), claim("recovery")], dev, registered, "c")} == {"screening"}
    assert recovery.difference.value == pytest.approx(sum(a - b for _, a, b, *_ in VALUES) / 52)
    # Each of the five contexts gains, so only all signs reversed give a sum of equal size.
    assert recovery.p == 2 / 2**5
    assert accuracy.p is not None
    small, large = sorted([accuracy.p, recovery.p])
    doubled = min(1.0, 2 * small)
    assert sorted([accuracy.corrected or 0, recovery.corrected or 0]) == [doubled, max(doubled, large)]
    assert recovery.power == pytest.approx(power_by_hand(0.3))
    (easy,) = verdicts([claim("recovery", difference=1.0)], dev, confirm)
    easy = replace(easy, registered=True)
    assert (easy.power > 0.8, easy.kind) == (True, "screening")  # Five dev contexts are too few.
    assert replace(easy, dev_contexts=30).kind == "confirmatory"
    assert verdicts([claim("recovery")], Samples([]), registered, "c")[0].kind == "screening"


def test_dev_samples_of_one_window_are_one_dev_context() -> None:
    dev, confirm = rows_of(VALUES, "dev"), rows_of(VALUES)
    for at, row in enumerate((*dev, *confirm)):
        row["metadata"] = {"template": row["context"], "group": at % 2}
    (by_template,) = verdicts([claim("recovery", clusters="template")], Samples(dev), Samples(confirm))
    assert len({row["context"] for row in dev}) == 5
    assert by_template.dev_contexts == 2


def power_by_hand(difference: float) -> float:
    """Return the power of a claim, from the error of a ratio of sums over contexts by the delta method.

    The number of confirming contexts equals the number of contexts of the error.
    """
    ratio = sum(a - b for _, a, b, *_ in VALUES) / 52
    rest: dict[str, float] = {}
    for context, a, b, blind, *_ in VALUES:
        rest[context] = rest.get(context, 0.0) + (a - b) + ratio * blind
    error = math.sqrt(sum(each**2 for each in rest.values())) / 52
    return NormalDist().cdf(difference / error - 2.241403)  # There are two claims, so the level is 0.05 / 2.


@pytest.mark.parametrize(("size", "outcome"), [(0.1, "holds"), (0.3, "smaller than claimed"), (-0.1, "holds")])
def test_a_claim_holds_only_if_its_size_is_met(size: float, outcome: str) -> None:
    values = [(f"{at}", -1.0 - at % 3 / 10, -3.0 - at % 5 / 10, -10.0, True, True) for at in range(40)]
    (verdict,) = verdicts([claim("recovery", difference=size)], Samples([]), Samples(rows_of(values)))
    assert verdict.difference.value == pytest.approx(0.21, abs=0.01)
    assert (verdict.outcome, verdict.bound) == (outcome, True)
    assert verdict.corrected_text == "≤ 0.0010"


@pytest.mark.parametrize(("margin", "outcome"), [(-0.2, "holds"), (-0.05, "open")])
def test_not_worse_than_the_full_cache_is_a_claim(margin: float, outcome: str) -> None:
    values = [(f"{at}", -0.5 - at % 7 / 5, -3.0, -10.0, True, True) for at in range(40)]
    wanted = claim("recovery", second=FULL, difference=margin)
    (verdict,) = verdicts([wanted], Samples([]), Samples(rows_of(values)))
    assert verdict.difference.value == pytest.approx(-0.107, abs=0.01)
    assert verdict.outcome == outcome


def test_samples_of_one_window_are_one_context_drawn_depth_by_depth() -> None:
    """Check windows with two questions each. A policy that answers only at one depth has no interval from depths."""
    values = [(f"{at}", 0.0 if at % 2 else -10.0, -10.0, -10.0, True, True) for at in range(24)]
    rows = rows_of(values)
    for at, row in enumerate(rows):
        row["metadata"] = {"window": at // 4 * 2 + at % 2, "depth": (0.1, 0.9)[at % 2]}
    samples = Samples(rows)
    assert samples.contexts == 12
    assert samples.recovery(A)[:3] == (0.5, 0.5, 0.5)
    few = Samples(rows[:16])  # With four windows for each depth, all depths are resampled together.
    assert few.recovery(A).low < 0.4
    for row in rows:
        row["metadata"] = {}
    assert Samples(rows).contexts == 24
    assert Samples(rows).recovery(A).low < 0.4


def test_other_caches_are_flagged_and_outside() -> None:
    rows = rows_of(VALUES)
    for row in rows:
        row["cells"][3]["kept"] = 30.4
    verdict, other = verdicts([claim("recovery"), claim("accuracy")], Samples(rows), Samples(rows))
    assert (verdict.p, verdict.corrected, other.p) == (None, None, None)
    assert verdict.flag == "prompt tokens kept: 30.0 and 30.4"


@pytest.mark.law("as-it-is-described")
def test_the_stage_that_loses_evidence_is_the_one_after_the_last_that_keeps_it() -> None:
    kept = {"a": [4, 1, 0, 2, 3], "b": [4, 4, 1, 1, 1], "c": [2, 0, 1, 3, 0]}
    rows = [
        {
            "context": str(at), "metadata": {}, "evidence_tokens": 4,
            "cells": [
                {"policy": name, "budget": "0.3", "evidence_kept": [0, 2 * kept[name][at]]} for name in kept
            ],
        }
        for at in range(5)
    ]
    stages = [Stage(f"stage {name}", name) for name in kept]
    nothing: Row = {"context": "x", "metadata": {}, "evidence_tokens": 0, "cells": []}
    assert lost_at(Samples([*rows, nothing]), stages, "0.3").tolist() == [3, 2, 0, 3, 1]


def test_a_task_that_the_full_cache_never_answers_decides_no_claim() -> None:
    rows = rows_of(VALUES)
    for row in rows:
        row["cells"][0]["right"] = False
    for verdict in verdicts([claim("recovery")], Samples([]), Samples(rows)):
        assert (verdict.outcome, verdict.flag) == ("not compared", "the full cache answers none of 6")


def test_a_constant_with_many_values_has_a_picture_of_its_own() -> None:
    values = {value: f"crystalcache(alpha={value})" for value in (4, 0, 0.5, 2, 1)}
    others = ["crystalcache", "random", "snapkv(W=8)", "snapkv(W=16)", 'crystalcache(impact="salience")']
    assert swept([*others, *values.values()]) == {("crystalcache", "alpha"): dict(sorted(values.items()))}
    assert swept([*others, *list(values.values())[:4]]) == {}


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("policy", ["planted:POLICY", "planted:POLICY@prompt", "planted:POLICY(alpha=1)"])
def test_a_report_imports_no_module_that_a_row_names(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert swept([policy, *(f"crystalcache(alpha={value})" for value in range(4))]) == {}
