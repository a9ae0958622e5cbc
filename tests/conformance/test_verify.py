"""`kvspec verify`: verdicts from outcomes, the certificate, and errors before any test."""

import hashlib
import json
import re
import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.checks.failing_input import differing_set, note_code, unequal
from conformance.paths import SPEC
from conformance.verify import __main__ as verify_main
from conformance.verify import certificate as certificate_module
from conformance.verify import outcomes, recording
from conformance.verify.certificate import GREEN, RED, YELLOW, badge, certificate, write, written
from conformance.verify.outcomes import Verdicts, verdicts_of
from conformance.verify.page import headline, junit, markdown, page, summary
from conformance.verify.request import parsed
from conformance.verify.subject import Subject, digest_of, of_backend, of_command, of_server
from conformance.witness.client import Server

pytestmark = pytest.mark.law("figures-are-counted-right")

SUBJECT = Subject("backend", "mine", "1.0", "mine:MINE", "1 of mine", "0" * 64)
VECTOR = "test_vectors.py::test_the_backend_holds_a_vector_of_a_stage[score-1]"


def lines(states: dict[str, str], items: dict[str, list[str]], ended: int = 1) -> list[dict[str, Any]]:
    """Return the lines that a run writes for tests with these outcomes. An exception follows the name of its test."""
    collected = {
        test: {"items": items[test], "exceptions": [test.partition("!")[2]] if "!" in test else []} for test in items
    }
    actual: list[dict[str, Any]] = [{"precision": "float64", "spec": "", "collected": collected}]
    for test, state in states.items():
        failure = {"input": "x=0", "found": f"{test} is wrong"} if state == "failed" else None
        actual += [{"began": test}]
        if state != "died":
            line = {"test": test, "state": state, "reason": "", "failure": failure}
            actual += [{**line, "examples": 7, "name": "mine", "families": ["diversity"]}]
    return [*actual, {"ended": ended}]


def judged(**tests: tuple[str, str]) -> Verdicts:
    """Return the verdicts of tests, each with its state and its items."""
    items = {name: about.split() for name, (_, about) in tests.items()}
    return verdicts_of(lines({name: state for name, (state, _) in tests.items() if state}, items))


WRONG = judged(a=("failed", "DV-GREEDY DV-COSINE"), b=("failed", "DV-COSINE"), c=("passed", "CC-PREFILL"))
RIGHT = judged(a=("passed", "DV-GREEDY"), b=("passed", "DV-COSINE"), c=("not offered", "CC-SCORE"))


@pytest.mark.parametrize(("states", "verdict"), [
    ("passed failed excepted", "fail"), ("passed excepted", "excepted"), ("passed skipped", "pass"),
    ("passed not-offered", "pass"), ("not-offered not-offered", "not offered"), ("skipped", "not run"),
    ("", "not run"), ("not-offered skipped", "not offered"),
])
def test_an_item_s_verdict_is_from_all_of_its_tests(states: str, verdict: str) -> None:
    tests = {f"t{at}": (state.replace("-", " "), "CC-SCORE") for at, state in enumerate(states.split())}
    assert judged(**tests).items["CC-SCORE"] == verdict


def test_the_failing_items_begin_with_the_test_that_is_about_the_fewest() -> None:
    assert WRONG.failing == ["DV-COSINE", "DV-GREEDY"]
    often = judged(a=("failed", "CC-CUT"), b=("failed", "CC-SCORE"), c=("failed", "CC-SCORE CC-CUT CC-SPLIT"),
                   d=("failed", "CC-SCORE"), e=("passed", "CC-CUT"))
    assert often.failing == ["CC-SCORE", "CC-CUT", "CC-SPLIT"]
    assert judged(a=("failed", "CC-COATTENTION CC-ATTENTION")).failing == ["CC-COATTENTION", "CC-ATTENTION"]
    assert (WRONG.smallest["DV-COSINE"].test, WRONG.certified) == ("b", False)


def test_the_tests_of_an_item_run_before_those_of_what_is_composed_of_it(request: pytest.FixtureRequest) -> None:
    about = ["CC-PREFILL", "", "CC-COATTENTION CC-ATTENTION", "CC-COATTENTION", "CC-SALIENCE", "CC-ATTENTION"]
    items = list[pytest.Item]()
    for names in about:
        items.append(pytest.Function.from_parent(request.node.parent, name=f"test_{names}", callobj=judged))
        items[-1].add_marker(pytest.mark.spec(*names.split()))
    vars(items[-1])["fixturenames"] = ["compiled"]
    recording.pytest_collection_modifyitems(items)
    assert [item.name.removeprefix("test_") for item in items] == [*about[-2:1:-1], "", "CC-PREFILL", about[-1]]


def test_a_family_is_certified_when_each_of_its_items_is_decided() -> None:
    assert RIGHT.certified
    assert RIGHT.families == ["diversity"]
    undecided = judged(a=("passed", "DV-GREEDY"), b=("skipped", "DV-COSINE"))
    assert undecided.missing == ["DV-COSINE"]
    assert not undecided.certified
    in_part = judged(a=("passed", "DV-GREEDY DV-COSINE"), b=("skipped", "DV-COSINE"), c=("skipped", "CC-SCORE"))
    assert in_part.missing == ["DV-COSINE"]
    assert (in_part.items["DV-COSINE"], in_part.certified) == ("pass", False)
    assert not verdicts_of([]).certified
    assert not judged(a=("passed", "DV-GREEDY DV-COSINE"), b=("failed", "")).certified  # The failed test has no item.


@pytest.mark.parametrize(("more", "unproven", "verdict"), [
    ({}, ["DV-COSINE"], "partial"), ({"c": ("passed", "DV-COSINE")}, [], "certified"),
    ({"c": ("failed", "")}, ["DV-COSINE"], "not certified"),
])
def test_what_is_excepted_throughout_is_certified_in_part(
    more: dict[str, tuple[str, str]], unproven: list[str], verdict: str,
) -> None:
    record = certified(judged(a=("passed", "DV-GREEDY"), b=("excepted", "DV-COSINE"), **more))
    assert (record["verdict"], record["unproven"]) == (verdict, unproven)
    assert ("DV-COSINE" in headline(record)) is (verdict == "partial")


def test_where_the_process_dies_its_test_fails_and_the_rest_is_not_run() -> None:
    states = {"a": "passed", "b": "died"}
    actual = verdicts_of(lines(states, {"a": ["DV-GREEDY"], "b": ["DV-COSINE"], "c": ["CC-SCORE"]}, ended=-11))
    assert [actual.items[name] for name in ("DV-GREEDY", "DV-COSINE", "CC-SCORE")] == ["pass", "fail", "not run"]
    assert actual.smallest["DV-COSINE"].found == "signal 11 ended the process"


def test_an_exception_is_needed_where_something_fails_under_it() -> None:
    names = {"a!DV-GREEDY": ["DV-GREEDY"], "b!DV-COSINE": ["DV-COSINE"], "c!DV-COSINE": ["DV-COSINE"]}
    states = dict(zip(names, ("passed", "passed", "excepted"), strict=True))
    assert verdicts_of(lines(states, names), ["DV-GREEDY", "DV-COSINE", "IN-WILSON"]).unneeded == [
        "DV-GREEDY", "IN-WILSON",
    ]


def test_a_vector_has_a_verdict_of_its_own() -> None:
    assert verdicts_of(lines({VECTOR: "failed"}, {VECTOR: ["CC-SCORE"]})).vectors == {"score-1": "fail"}


def certified(verdicts: Verdicts, *options: str) -> dict[str, Any]:
    return certificate(parsed(["--backend", "mine:MINE", *options]), SUBJECT, verdicts)


def test_the_methods_of_which_scores_were_compared_are_told() -> None:
    events = [*lines({"a": "passed"}, {"a": ["PO-KNORM"]}), {"scored": ["snapkv", "knorm"]}, {"scored": ["knorm"]}]
    assert certified(verdicts_of(events))["run"]["scores"] == ["knorm", "snapkv"]
    assert "scores" not in certified(RIGHT)["run"]


EXCEPTION = """
[[exception]]
item = "DV-GREEDY"
kind = "xfail"
reason = "a \\"known\\" <one>"
issue = "https://example.org/7"
expiry = 2999-01-01
"""


@pytest.mark.parametrize("verdicts", [WRONG, RIGHT])
@pytest.mark.parametrize("options", [[], ["--seed", "7", "--precision", "float64", "--profile", "few"]])
def test_a_certificate_is_of_its_schema_and_is_read_as_it_was_written(
    tmp_path: Path, verdicts: Verdicts, options: list[str],
) -> None:
    (tmp_path / "known.toml").write_text(EXCEPTION, encoding="utf-8")
    record = certified(verdicts, "--exceptions", str(tmp_path / "known.toml"), *options)
    write(record, tmp_path / "certificate.toml")
    actual = certificate_module.read(tmp_path / "certificate.toml")
    assert actual == record
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(json.loads(json.dumps(actual, default=str)))] == []
    assert (actual["verdict"] == "certified") is verdicts.certified
    assert actual["judged"] == "the items of its stages"


TEXT = st.text(max_size=4)
PLAIN = st.one_of(TEXT, st.integers(-2**62, 2**62), st.booleans(), st.dates(), st.lists(TEXT, max_size=2))
TABLE = st.dictionaries(TEXT, PLAIN, max_size=2)
TABLES = st.one_of(PLAIN, TABLE, st.lists(TABLE, min_size=1, max_size=2), st.dictionaries(TEXT, TABLE, max_size=2))


@given(st.dictionaries(TEXT, TABLES, max_size=3))
@example({"a.b": {"\x7f": {"\x00": ['"\\', "\u2028"]}}, "": {}})
def test_what_is_written_is_read(table: dict[str, Any]) -> None:
    assert tomllib.loads(written(table)) == table


def test_counts_are_of_tests_and_of_examples() -> None:
    assert certified(RIGHT)["counts"] == {
        "tests": 3, "failed": 0, "excepted": 0, "not_served": 0, "not_promised": 0, "N/A": 0, "passed": 2,
        "not_offered": 1, "not_run": 0, "examples": 14,
    }


def test_the_command_that_repeats_a_test_asks_for_the_same_run() -> None:
    asked = parsed(["--command", "./engine -x 'a b'", "--seed", "7", "--profile", "few", "--timeout", "2"])
    words = asked.repeat("test_score.py::test_x[a b]")
    assert words == (
        "kvspec verify --command './engine -x '\"'\"'a b'\"'\"'' --timeout 2.0 --profile few --seed 7"
        " -- 'test_score.py::test_x[a b]'"
    )


@pytest.mark.law("as-it-is-described")
def test_quick_means_few_examples_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPEC_PROFILE", "nightly")
    for more, profile in ((["--quick"], "few"), (["--quick", "--profile", "dev"], "dev"), ([], "nightly")):
        assert parsed(["--backend", "numpy", *more]).profile == profile


class Text(HTMLParser):
    """Parser of the text of a page and of its external resources."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.loads = "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        outside = [value for name, value in attrs if name in ("src", "href") and not f"{value}".startswith("#")]
        self.loads += [tag] if outside or tag in ("script", "link", "img") else []

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.law("as-it-is-described")
def test_the_page_says_what_the_certificate_says_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(EXCEPTION, encoding="utf-8")
    reader = Text()
    shown = page(certified(WRONG, "--exceptions", str(tmp_path / "known.toml")))
    assert '<h1 class="fail">not certified</h1><p>mine 1.0 does not conform' in shown
    reader.feed(shown)
    assert reader.loads == []
    must = outcomes.must("DV-COSINE")
    expected = ("mine 1.0 does not conform", "b is wrong", "-- b", 'a "known" <one>', must, "CC-PREFILL")
    assert [words for words in expected if words not in reader.text] == []


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("verdicts", "exceptions", "right", "colour"), [
    (RIGHT, 0, "diversity", GREEN), (RIGHT, 2, "diversity; 2 exceptions", YELLOW),
    (WRONG, 0, "not certified; 2 items", RED), (WRONG, 1, "not certified; 2 items", RED),
])
def test_the_badge(verdicts: Verdicts, exceptions: int, right: str, colour: str) -> None:
    record = {**certified(verdicts), "exception": [{}] * exceptions}
    image = ET.fromstring(badge(record))
    texts = [node.text for node in image.iter() if node.text and node.text.strip()]
    assert texts == [f"kvspec {record['spec']}", right]
    assert [node.get("fill") for node in image if node.get("width")] == [colour]


@pytest.mark.law("as-it-is-described")
def test_the_summary_is_short_and_tells_each_failure_once() -> None:
    summary_lines = list(summary(certified(WRONG)))
    assert sum("b is wrong" in line for line in summary_lines) == 1
    assert "mine 1.0 does not conform to kvspec" in summary_lines[-1]
    assert [line.split(maxsplit=1) for line in summary_lines[1:6]] == [
        ["crystal", "not offered"], ["breath", "not offered"], ["diversity", "2 fail"], ["nestedkv", "not offered"],
        ["policies", "not offered"],
    ]
    assert len("\n".join(summary_lines).splitlines()) < 30
    skipped = judged(a=("passed", "DV-GREEDY DV-COSINE"), b=("skipped", "DV-COSINE"))
    summary_lines = list(summary(certified(skipped, "--seed", "3")))
    assert summary_lines[0] == "2 tests: 1 passed, 0 failed, 1 not run; 7 examples, --seed 3"
    assert summary_lines[-1] == "\nmine 1.0 is not certified: no test fails, but 1 item is not decided"
    apart = judged(a=("failed", "DV-GREEDY"), b=("not offered", "CC-CUT"), c=("skipped", "DV-COSINE"))
    summary_lines = list(summary(certified(apart)))
    assert summary_lines[0].startswith("3 tests: 0 passed, 1 failed, 1 not run, 1 not offered; 0 examples")
    assert summary_lines[-1].endswith(": DV-GREEDY fails; 1 item not decided")
    assert "not decided, since a test was skipped or did not run: DV-COSINE" in "\n".join(summary_lines)


@pytest.mark.law("as-it-is-described")
def test_an_error_of_the_code_under_test_comes_before_the_failed_items() -> None:
    record = certified(WRONG)
    record["items"]["DV-COSINE"]["found"] = "SubjectFailure: the policy raised KeyError at mine.py:3\n'W'"
    text = "\n".join(summary(record))
    before, _, after = text.partition("DV-COSINE fails")
    assert "the code under test raised an error in place of a result:" in before
    assert "  the policy raised KeyError at mine.py:3\n  'W'" in before
    assert "not compared, because of the error above" in after
    assert text.count("raised KeyError") == 1
    assert "raised an error" not in "\n".join(summary(certified(WRONG)))


def test_of_two_long_results_the_number_that_differs_is_shown() -> None:
    right = [float(i) for i in range(100)]
    wrong = [*right[:70], 70.5, float("nan"), *right[72:]]
    assert unequal("S3: M", wrong[:71], right[:71]) == "S3: M[70] is 70.5, not 70.0 (1 of 71 numbers differ)"
    assert unequal("M", wrong, right) == "M[71] is nan, not 71.0 (2 of 100 numbers differ)"
    assert unequal("W", np.diag(right[:4]), np.zeros((4, 4))) == "W[3, 3] is 3.0, not 0.0 (3 of 16 numbers differ)"
    assert unequal("D", [1.0, 2.0], [1.0]) == "D is [1.0, 2.0], not [1.0]"
    assert differing_set([[0, 1], [1, 5]], [[0, 1], [1, 3]]) == "kept set 1 of 2 keeps [5] in place of [3]"
    assert differing_set([[0, 1, 5]], [[0, 3]]) == (
        "kept set 0 of 1 has 3 tokens, and must have 2: it keeps [1, 5] in place of [3]"
    )
    assert differing_set([[1, 0]], [[0, 1]]) == "kept set 0 of 1 is [1, 0], and must be in the order [0, 1]"


def test_the_recorded_input_is_the_code_that_makes_it_again() -> None:
    with pytest.raises(AssertionError) as caught, note_code("x = 1\ny = 2"):
        raise AssertionError(f"kept sets differ: {list(range(150))} in place of [7]")
    recorded = recording.failure(caught.value, [], {"method": object()})
    assert recorded["input"] == "x = 1\ny = 2"
    assert recorded["found"].endswith("148, 149] in place of [7]")
    assert recording.failure(AssertionError("wrong"), [], {"n": 3})["input"] == "    n=3"


@pytest.mark.law("as-it-is-described")
def test_the_summary_cuts_no_value_that_differs() -> None:
    record = certified(judged(a=("failed", "DV-GREEDY")))
    record["items"]["DV-GREEDY"] |= {"input": "", "found": f"kept set 0 keeps {[*range(90)]} in place of [7]"}
    text = "\n".join(summary(record))
    assert "88, 89] in place of [7]\n" in text
    assert "  input   fixed, in the code of the test\n" in text


@pytest.mark.law("as-it-is-described")
def test_an_error_about_the_scores_is_shown_once_and_without_the_rules_of_items() -> None:
    record = certified(judged(a=("failed", "DV-GREEDY"), b=("failed", "DV-COSINE")))
    for tokens, item in enumerate(record["failing"], 8):
        message = f"SpecError: score = '(1, {tokens})': must be an array of numbers{' and more' * 30}; the kept sets"
        record["items"][item] |= {"found": message, "input": f"tokens={tokens}"}
    text = "\n".join(summary(record))
    assert text.count("must be an array of numbers") == text.count("; the kept sets") == text.count("tokens=") == 1
    assert text.count("not compared, because of the error above") == 2
    for shown in (text, "\n".join(markdown(record)), page(record)):
        assert "MUST" not in shown


@pytest.mark.law("as-it-is-described")
def test_a_pull_request_and_a_ci_server_are_told_the_same() -> None:
    text = "\n".join(markdown(certified(WRONG)))
    assert text.startswith("**kvspec: mine 1.0 does not conform to kvspec")
    assert "| diversity | 2 fail |" in text
    assert "x=0\nb is wrong" in text
    suite = ET.fromstring(junit(judged(
        a=("failed", "DV-GREEDY"), b=("passed", "DV-COSINE"), c=("not offered", "CC-CUT"), d=("skipped", "CC-CUT"),
    )))
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "4", "failures": "1", "skipped": "2",
    }
    assert [(inner.tag, inner.get("message")) for case in suite for inner in case] == [
        ("failure", "DV-GREEDY: a is wrong"), ("skipped", "not offered"), ("skipped", "not run"),
    ]


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("kind", "message"), [
    ("policy", "mine:X keeps its 1 promise; not compared with any method"),
    ("cache", "mine conforms to kvspec"),
])
def test_a_policy_keeps_promises_and_conforms_to_nothing(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conformance.verify.certificate.version", lambda name: "1.0")  # torch may be missing
    rows = {"GQA": "passed", "budget exact": "not promised"}
    row = list(rows) if kind == "policy" else [f"llama: {name}" for name in rows]
    states = dict(zip("ab", rows.values(), strict=True))
    verdicts = verdicts_of(lines(states, {"a": row[:1], "b": row[1:]}), engine=False)
    subject = Subject(kind, "mine:X", "", "mine:X", "1 of mine", "0" * 64)
    record = certificate(parsed([f"--{kind}", "mine:X"]), subject, verdicts)
    assert headline(record).startswith(message)
    assert record["verdict"] == ("keeps its promises" if kind == "policy" else "certified")
    assert ("keeps its" in badge(record)) is ("not compared with any method" in badge(record)) is (kind == "policy")


def test_the_quick_profile_is_passed_and_nothing_is_certified() -> None:
    record = certified(RIGHT, "--quick")
    assert record["verdict"] == "passes the quick run"
    assert headline(record) == f"mine 1.0 passes the quick run of kvspec {record['spec']} on diversity"
    assert certified(WRONG, "--quick")["verdict"] == "does not pass the quick run"


@pytest.mark.law("as-it-is-described")
def test_coverage_is_stated() -> None:
    rows = {"DV-GREEDY": "passed", "DV-COSINE": "failed", "GQA": "N/A", "CC-CUT": "skipped"}
    verdicts = judged(**{f"test_{at}": (state, item) for at, (item, state) in enumerate(rows.items())})
    some = replace(verdicts, items={item: verdicts.items[item] for item in rows})
    words = "2 of 4 rows decided; N/A: GQA; not run: CC-CUT"
    record = certified(some, "--profile", "few")
    assert record["covers"] == f"profile few, at most 12 random examples of each property; {words}"
    full = "profile few, at most 12 random examples of each property, no full-size inputs; "
    assert certified(some, "--quick")["covers"] == full + words
    for shown in ("\n".join(summary(record)), page(record)):
        assert f"profile few, at most 12 random examples of each property; {words}" in shown
    assert "2 of 4 rows decided; N/A: GQA" in "\n".join(markdown(record))
    assert certified(RIGHT)["covers"].startswith("profile ci, at most 150 random examples of each property; 2 of ")
    assert re.search(r"; not run: (CC-[A-Z-]+, ){11}CC-[A-Z-]+ and \d+ more; not offered: ", certified(RIGHT)["covers"])
    older = {name: value for name, value in record.items() if name != "covers"}
    assert certificate_module.differences(older, record) == []
    (line,) = certificate_module.differences({**record, "covers": "everything"}, record)
    assert line.startswith("covers: everything in the certificate, profile few, ")


def test_items_are_of_the_families_that_the_text_gives_them() -> None:
    assert outcomes.families_of("CC-RARITY") == ["crystal", "breath"]
    assert outcomes.families_of("DV-GREEDY") == ["diversity"]
    assert outcomes.families_of("CC-PREFILL") == [outcomes.COMPOSED]
    assert list(outcomes.families()) == ["crystal", "breath", "diversity", "nestedkv", "policies"]
    assert outcomes.must("CC-SCORE") == "give the maximum, and NaN where `Mtilde` is NaN. `alpha` = 0 gives D itself."
    assert [item for items in outcomes.families().values() for item in items if not outcomes.must(item)] == []


@pytest.mark.law("an-identity-tells-apart")
def test_the_digest_is_that_of_what_sha256sum_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"mine/a.py": "X = 1\n", "mine/b/c.bin": "c", "mine/__pycache__/a.pyc": "no", "other.py": "no"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "mine/__init__.py").write_text("from reference.backend import BACKEND\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["mine/__init__.py", "mine/a.py", "mine/b/c.bin"]
    printed = "".join(f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    actual = of_backend("mine:BACKEND")
    assert (actual.digest, actual.files) == (hashlib.sha256(printed.encode()).hexdigest(), "3 of mine")
    changed = {name: tmp_path / name for name in names}
    (tmp_path / "mine/b/c.bin").write_text("d", encoding="utf-8")
    assert digest_of(changed) != actual.digest != digest_of({**changed, "mine/e": tmp_path / "other.py"})


def test_a_command_s_files_are_its_executable_and_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "engine").chmod(0o755)
    for name in ("table", "a/w.bin", "b/w.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    actual = of_command("./engine --table=table a/w.bin b/w.bin")
    assert (actual.kind, actual.name, actual.files) == ("command", "engine", "a/w.bin b/w.bin engine table")
    (tmp_path / "b/w.bin").write_text("a/w.bin", encoding="utf-8")
    assert of_command(actual.named).digest != actual.digest
    assert of_command("sh -c 'exec ./engine \"table\"'").files == "PATH/sh engine table"


def test_the_name_of_a_server_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"models": ["tiny", "\x1b[2J\nother"], "completes_ids": True, "version": ""}
    monkeypatch.setattr("conformance.verify.subject.find_spec", bool)  # torch may be missing
    for name, answer in answers.items():
        monkeypatch.setattr(Server, name, lambda self, answer=answer: answer)
    assert of_server("http://127.0.0.1:1", "tiny").name == "tiny, ?[2J other"


ENGINES = """
from dataclasses import replace
from reference.backend import BACKEND
from reference.policies import knorm
SILENT = knorm()
EMPTY = replace(BACKEND, name="empty", **dict.fromkeys(("crystal", "breath", "diversity", "nestedkv", "policies")))
NUMBER = 1
"""


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("asked", "complaint"), [
    ("--backend absent:MINE", "No module named 'absent'"), ("--backend engines:NONE", "has no attribute 'NONE'"),
    ("--backend engines:NUMBER", "must be a spec.backend.Backend; the type is int"),
    ("--backend engines:EMPTY", "kvspec cannot test the backend"),
    ("--backend raises:X", "cannot be loaded here: the module raises ZeroDivisionError: no (raises.py, line 1)"),
    ("--backend leaves:X", "raises SystemExit: 3"), ("--backend skips:X", "raises Skipped: no"),
    ("--backend bogus", "must be one of numpy, numba, torch, triton"),
    ("--command ./absent", "must begin with the name of an executable file"),
    ("--command 'a", "No closing quotation"), ("--backend numpy --quick --out {file}", "cannot be created as a folder"),
    ("--backend numpy --exceptions absent.toml", "exceptions = 'absent.toml': cannot be read: No such file"),
    ("--check absent.toml", "check = 'absent.toml': cannot be read (No such file or directory); give the path of a"),
    ("--backend numpy --exceptions {file}", "engines.py"),
    ("--check {file}", "must be a certificate"), ("--check {empty}", "must be a certificate of schema 2"),
    ("--check {deep}", "must be a certificate"),
    ("--check c.toml --quick", "can be combined only with --seed, --yes, --force and --out"),
    ("--policy snapkv --yes", "can be given only with --check"),
    *((f"--command ./absent --timeout={seconds}", "timeout = ") for seconds in ("nan", "inf", "-1", "0", "1e300")),
    ("--backend numpy --as snapkv,h2o,snapkv", "as = 'snapkv': is given twice"),
    ("--backend numpy --seed -1", "must be 0 or more"), ("--backend numpy --timeout 1", "only with --command"),
    ("", "one of the arguments --backend --command --policy --cache --server --check is required"),
    ("--backend numpy -k x", "after --"), ("--polcy snapkv", "--polcy snapkv; did you mean --policy?"),
    ("engines", "unrecognized arguments: engines; write --policy engines:POLICY"),
    ("engines.py", "unrecognized arguments: engines.py; write --policy engines:POLICY"),
    ("--backend numpy --fail-fats", "--fail-fats; did you mean --fail-fast?"),
    ("--cache a:B --positions absolute", "invalid choice: 'absolute'"),
    ("--backend numpy --profile weekly", "invalid choice: 'weekly'"), ("--backend numpy --seed x", "invalid int value"),
    ("--backend numpy", "TRITON_INTERPRET = '1'"), ("--policy absent:MINE", "No module named 'absent'"),
    ("--policy engines:NONE", "has no attribute 'NONE'"), ("--policy engines:NUMBER", "the type is int"),
    ("--policy engines:SILENT", "must declare at least one promise"), ("--policy bogus", "policy = 'bogus'"),
    ("--policy leaves:X", "raises SystemExit: 3"), ("--policy snapkv --model x", "model = 'x': can be given only with"),
    ("--policy snapkv --precision float32", "only with --backend or --command"),
    ("--cache absent:run", "No module named 'absent'"), ("--cache engines:NUMBER", "must be a function"),
    ("--cache run", "must be 'module:ATTRIBUTE', because no installed package has such a name"),
])
def test_what_cannot_be_judged_is_refused_in_one_line(
    asked: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    sources = {"engines": ENGINES, "raises": "raise ZeroDivisionError('no')", "leaves": "raise SystemExit(3)"}
    for name, text in {**sources, "skips": "import pytest\npytest.skip('no', allow_module_level=True)"}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    for name, text in {"empty": "", "deep": f"a = {'[' * 9_000}"}.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engines", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    files = {"file": "engines.py", "empty": "empty.toml", "deep": "deep.toml"}
    words = asked.format(**{name: tmp_path / file for name, file in files.items()}).split()
    monkeypatch.setattr("sys.argv", ["verify", *words])
    monkeypatch.setattr("conformance.verify.runs.subprocess.Popen", None)
    if "--cache" in asked:  # The command checks for torch first.
        monkeypatch.setattr("conformance.verify.subject.find_spec", bool)
    try:
        code: Any = verify_main.main()
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr().err
    assert (code, printed.count("\n"), printed.startswith("kvspec: ")) == (2, 1, True), printed
    assert complaint in printed
    assert not Path("results").exists()
