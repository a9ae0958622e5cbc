"""The plugin outside the tree: a different folder, a different backend, exceptions with reasons, marks of laws."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from conformance import exceptions
from conformance.paths import ROOT
from conformance.plugin import known_vectors, profile_of
from tests.laws import LAWS

TESTS = """
import pytest
from hypothesis import settings

@pytest.mark.spec("{item}")
def test_sum(backend, stages, precision):
    assert (backend.name, precision) == {expected!r}

def test_profile():
    assert settings.default.max_examples == {examples}
"""

WHY = 'reason = "known"\nissue = "https://example.org/7"\nexpiry = 2999-01-01'


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "KVSPEC_PROFILE")}
    clean = {name: value for name, value in clean.items() if not name.startswith("PYTEST")}
    # Loading the remaining plugins of this environment would take twice as long as all tests here.
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    paths = os.pathsep.join([str(ROOT), str(directory)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conformance.plugin", "-p", "no:cacheprovider", "-rA", *arguments],
        cwd=directory, env={**clean, "PYTHONPATH": paths, **environment}, capture_output=True, text=True, check=False,
    )


def write(
    directory: Path, item: str = "CC-SCORE", expected: tuple[str, str] = ("numpy", "float64"), examples: int = 50,
) -> None:
    text = TESTS.format(item=item, expected=expected, examples=examples)
    (directory / "test_outside.py").write_text(text, encoding="utf-8")


def test_the_header_says_what_runs(tmp_path: Path) -> None:
    write(tmp_path, examples=12)
    result = run(tmp_path, KVSPEC_PROFILE="few")
    assert result.returncode == 0, result.stdout
    words = ("kvspec: backend numpy, S1 in float64, spec ", "numpy ", "hypothesis ", "python ",
             "profile few (12 examples, every 20th case of long loops)")
    assert [one for one in words if one not in result.stdout] == []


@pytest.mark.parametrize(("option", "environment", "examples"), [
    (None, {}, 50), (None, {"CI": "true"}, 150), (None, {"KVSPEC_PROFILE": "nightly", "CI": "true"}, 20_000),
    ("ci", {"KVSPEC_PROFILE": "nightly"}, 150),
])
def test_an_option_comes_before_the_environment(
    option: str | None, environment: dict[str, str], examples: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = SimpleNamespace(getoption=lambda name: option)
    for name in ("CI", "KVSPEC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert settings.get_profile(profile_of(config)).max_examples == examples
    monkeypatch.setenv("KVSPEC_PROFILE", "weekly")
    if option is None:
        with pytest.raises(pytest.UsageError, match="KVSPEC_PROFILE = 'weekly'"):
            profile_of(config)


def test_anybody_s_backend_is_judged(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from spec.backend import Backend\nfrom reference.backend import BACKEND as B\n"
        "MINE = Backend('mine', B.crystal)\nEMPTY = Backend('empty')\n", encoding="utf-8",
    )
    write(tmp_path, expected=("mine", "float32"))
    assert run(tmp_path, "--backend", "mine:MINE").returncode == 0
    assert "BackendUnavailable" in run(tmp_path, "--backend", "mine:EMPTY").stdout


PARTIAL = """
from dataclasses import replace
from reference.backend import BACKEND

NOTHING = {family: None for family in ("crystal", "breath", "diversity", "nestedkv", "policies")}
BREATH, NESTEDKV = (
    replace(BACKEND, name="mine", **{**NOTHING, family: getattr(BACKEND, family)}) for family in ("breath", "nestedkv")
)
"""
FILES = ("resonance", "activation", "score", "nestedkv", "diversity", "policy_stages", "vectors", "false_properties")


@pytest.mark.parametrize("family", ["breath", "nestedkv"])
def test_a_backend_is_judged_on_the_families_that_it_has(tmp_path: Path, family: str) -> None:
    """Tests of other families are skipped by name, no test fails, and tests of the backend's family run."""
    (tmp_path / "mine.py").write_text(PARTIAL, encoding="utf-8")
    files = [f"conformance.suite.test_{name}" for name in FILES]
    result = run(
        tmp_path, "--backend", f"mine:{family.upper()}", "--kvspec-profile", "few", "-q", "--pyargs", *files,
        "-k", "not equal_the_model and not end_to_end and not hold_a_trunk_up and not number_of_calls",
    )
    reasons = set(re.findall(r"SKIPPED .*: (backend .*)", result.stdout))
    others = {"crystal", "breath", "nestedkv", "diversity", "policies"} - {family}
    assert result.returncode == 0, result.stdout
    assert reasons == {f"backend 'mine' has no stage family {other!r}" for other in others}
    assert re.search(r"\d+ passed", result.stdout)


ASIDE = """
import pytest

@pytest.mark.parametrize('backend', ['absent'])
def test_own(backend):
    assert False

@pytest.mark.judges('mine')
def test_of_mine():
    pass

@pytest.mark.judges('another')
def test_of_another():
    pass
"""


def test_a_third_party_s_backend_is_given_what_judges_it_alone(tmp_path: Path) -> None:
    """Tests of kvspec may have a parameter named backend, and tests of one backend name it. Only kvspec runs both."""
    (tmp_path / "test_aside.py").write_text(ASIDE, encoding="utf-8")
    assert "1 passed, 2 deselected" in run(tmp_path, "--backend", "mine", "--strict-markers").stdout
    assert "1 failed, 2 passed" in run(tmp_path, "--backend", "numpy", "--strict-markers").stdout


def test_a_marker_of_an_unknown_item_is_refused(tmp_path: Path) -> None:
    write(tmp_path, item="CC-NO-SUCH-ITEM")
    result = run(tmp_path)
    assert result.returncode != 0
    assert "unknown item 'CC-NO-SUCH-ITEM'" in result.stderr + result.stdout


CASES = """
import pytest

@pytest.mark.spec("CC-SCORE")
def test_of_an_item(backend_under_test):
    assert False

@pytest.mark.spec("CC-CUT")
def test_left_out(backend_under_test):
    assert False

@pytest.mark.spec("CC-MERGE")
def test_itself(backend_under_test):
    assert False

@pytest.mark.spec("CC-MERGE")
@pytest.mark.parametrize("case", ["a", "b"])
def test_case(backend_under_test, case):
    assert case == "a"

@pytest.mark.spec("CC-SPLIT")
def test_that_passes(backend_under_test):
    pass
"""
EXCEPTED = {
    'item = "CC-SCORE"': "xfail", 'item = "CC-CUT"': "skip", 'test = "test_cases.py::test_itself"': "xfail",
    'test = "test_cases.py::test_case[b]"': "xfail", 'item = "CC-SPLIT"': "xfail",
}


def test_an_exception_covers_its_tests(tmp_path: Path) -> None:
    """Check exceptions for an item, a test and a case.

    A passing test under an exception is no failure if a second test of the item may fail.
    """
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    entries = [f'[[exception]]\n{subject}\nkind = "{kind}"\n{WHY}\n' for subject, kind in EXCEPTED.items()]
    (tmp_path / "known.toml").write_text("\n".join(entries), encoding="utf-8")
    result = run(tmp_path, "--kvspec-exceptions", "known.toml", "-o", "xfail_strict=true")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped, 3 xfailed, 1 xpassed" in result.stdout
    actual = re.findall(r"^(XFAIL|XPASS|PASSED) test_cases.py::(\S+)", result.stdout, re.MULTILINE)
    assert dict(map(reversed, actual)) == {
        "test_of_an_item": "XFAIL", "test_itself": "XFAIL", "test_case[a]": "PASSED", "test_case[b]": "XFAIL",
        "test_that_passes": "XPASS",
    }


def test_one_vector_can_be_excepted(tmp_path: Path) -> None:
    vectors = sorted(name for name in known_vectors() if name.startswith("score-"))
    entry = f'[[exception]]\nvector = "{vectors[0]}"\nkind = "skip"\n{WHY}\n'
    (tmp_path / "known.toml").write_text(entry, encoding="utf-8")
    options = ["--kvspec-exceptions", "known.toml", "--pyargs", "conformance.suite.test_vectors", "-k", "score-"]
    result = run(tmp_path, *options)
    assert re.findall(r"PASSED .*\[(score-\d+)\]", result.stdout) == vectors[1:], result.stdout
    assert "1 skipped" in result.stdout


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('item = "CC-SCORE"\nkind = "xfail"\nissue = "#7"', "needs a reason and an issue"),
        ('item = "CC-SCORE"\nkind = "xfail"\nreason = " "\nissue = "#7"', "needs a reason and an issue"),
        ('item = "CC-SCORE"\nkind = "xfail"\nreason = "known"', "needs a reason and an issue"),
        ('item = "CC-SCORE"\nkind = "xfail"\nreason = "known"\nissue = "#7"', "needs an expiry"),
        ('item = "CC-SCORE"\nkind = "xfail"\nreason = "known"\nissue = "#7"\nexpiry = "2999-01-01"', "without quotes"),
        ('item = "CC-SCORE"\nkind = "xfail"\nreason = "known"\nissue = "#7"\nexpiry = 2020-01-01',
         "the exception of 'CC-SCORE' expired on 2020-01-01"),
        (f'item = "CC-SCORE"\nkind = "ignore"\n{WHY}', "kind must be"),
        (f'item = "CC-NONE"\nkind = "skip"\n{WHY}', "unknown item 'CC-NONE'"),
        (f'vector = "score-0"\nkind = "skip"\n{WHY}', "unknown vector 'score-0'"),
        (f'kind = "skip"\n{WHY}', "either an item, a test or a vector"),
        (f'item = "CC-SCORE"\ntest = "a.py::b"\nkind = "skip"\n{WHY}', "either an item, a test or a vector"),
        (f'item = "CC-SCORE"\nkind = "skip"\n{WHY}\nuntil = "2030"', "unknown keys until"),
        (f'item = 3\nkind = "skip"\n{WHY}', r'item = 3: must be text in quotes: type item = "\.\.\."'),
        ('item = "CC-SCORE"\nkind = "skip"\nreason = true\nissue = "#7"', "reason = True: must be text in quotes"),
        ('item = "CC-SCORE"\nkind = ["skip"]', r"kind = \['skip'\]: must be text in quotes: type kind|kind must be"),
        ("item = ", "known.toml"),
    ],
)
def test_a_careless_exception_is_refused(tmp_path: Path, entry: str, complaint: str) -> None:
    file = tmp_path / "known.toml"
    file.write_text(f"[[exception]]\n{entry}\n", encoding="utf-8")
    with pytest.raises(pytest.UsageError, match=complaint):
        exceptions.read(file, frozenset({"CC-SCORE"}), frozenset({"score-1"}))


@pytest.mark.parametrize("text", ["[[exceptions]]", "[exception]", "exception = [1]", 'item = "CC-SCORE"'])
def test_a_misspelled_table_of_exceptions_is_refused(tmp_path: Path, text: str) -> None:
    """The table `exceptions` was once ignored, and the known failures failed."""
    file = tmp_path / "known.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(pytest.UsageError, match=r"type \[\[exception\]\]"):
        exceptions.read(file, frozenset({"CC-SCORE"}), frozenset({"score-1"}))


@pytest.mark.parametrize("gone", ["test_outside.py::test_gone", "test_outside.py::test_sum[case]"])
def test_an_exception_for_a_test_that_is_gone_fails_the_run(tmp_path: Path, gone: str) -> None:
    write(tmp_path)
    entry = f'[[exception]]\ntest = "{gone}"\nkind = "skip"\n{WHY}\n'
    (tmp_path / "known.toml").write_text(entry, encoding="utf-8")
    result = run(tmp_path, "--kvspec-exceptions", "known.toml")
    assert result.returncode != 0
    assert "unknown test" in result.stderr + result.stdout


CONFTEST = ROOT / "tests" / "conftest.py"
LAW, OTHER = '@pytest.mark.law("freed-memory")', '@pytest.mark.law("saved-is-what-was")'
ITEM = '@pytest.mark.spec("CC-SCORE")'


@pytest.mark.parametrize(
    ("marks", "complaint"),
    [
        ((), "test_it: needs the mark spec or law"),
        ((pytest.mark.nightly,), "test_it: needs the mark spec or law"),
        ((pytest.mark.law("no-such-law"),), r"unknown law \('no-such-law',\), must be one of eviction-equals-"),
        ((pytest.mark.law(name="freed-memory"),), r"unknown law \(\)"),
    ],
)
def test_a_test_without_an_item_and_without_a_known_law_is_refused(
    marks: tuple[pytest.MarkDecorator, ...], complaint: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conftest = importlib.import_module("tests.conftest")
    monkeypatch.setattr(conftest, "HERE", request.path.parents[1])
    monkeypatch.setattr(conftest, "MODELS", (request.path.parent.name,))
    item = pytest.Function.from_parent(request.node.parent, name="test_it", callobj=run)
    for mark in marks:
        item.add_marker(mark)
    with pytest.raises(pytest.UsageError, match=complaint):
        conftest.pytest_collection_modifyitems([item])


MARKED: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    ((ITEM,), "", ()), ((LAW,), "", ("freed-memory",)), ((LAW, OTHER), "", ("freed-memory", "saved-is-what-was")),
    ((), f"pytestmark = {LAW[1:]}", ("freed-memory",)),
    # Marks of a test take precedence over marks of its module.
    ((OTHER,), f"pytestmark = {LAW[1:]}", ("saved-is-what-was",)), ((ITEM,), f"pytestmark = {LAW[1:]}", ()),
]


def test_a_failure_says_the_sentences_of_its_own_laws(tmp_path: Path) -> None:
    (inside := tmp_path / "models_integration").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    for at, (marks, module, _) in enumerate(MARKED):
        text = "\n".join(["import pytest", module, *marks, f"def test_{at}():", "    assert False", ""])
        (inside / f"test_{at}.py").write_text(text, encoding="utf-8")
    result = run(tmp_path, "--strict-markers", "-r", "N")
    _, *reports = re.split(r"^_{9,} test_\d _{9,}$", result.stdout, flags=re.MULTILINE)
    for (_, _, named), failure in zip(MARKED, reports, strict=True):
        assert [name for name in LAWS if f"{name}: {LAWS[name]}" in failure] == [name for name in LAWS if name in named]


DRAWS = """
import importlib
from hypothesis import given, settings, strategies as st

ALWAYS = settings(derandomize=True, database=None)

def draws():
    found = []
    @ALWAYS
    @given(st.lists(st.floats(0, 100)), st.integers(0, 10**5))
    def drawn(x, n):
        found.append((x, n))
    drawn()
    return found

def test_draws():
    before = draws()
    assert importlib.import_module("imported_late").NUMBERS
    assert draws() == before
"""


def test_what_a_test_imports_changes_no_later_draw(tmp_path: Path) -> None:
    """Workers take tests in any order, and Hypothesis draws constants of all imported modules."""
    (tmp_path / "imported_late.py").write_text(f"NUMBERS = {[at / 8 for at in range(99)]}", encoding="utf-8")
    (tmp_path / "test_draws.py").write_text(DRAWS, encoding="utf-8")
    assert "1 passed" in run(tmp_path).stdout


def test_what_stands_elsewhere_needs_neither(tmp_path: Path) -> None:
    """Check that the conftest requires marks only for tests in its folder."""
    (inside := tmp_path / "kvspec").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (inside / "test_it.py").write_text(f"import pytest\n{LAW}\ndef test_it():\n    assert False\n", encoding="utf-8")
    (tmp_path / "test_elsewhere.py").write_text("def test_elsewhere():\n    pass\n", encoding="utf-8")
    assert "1 failed, 1 passed" in run(tmp_path, "--strict-markers").stdout


def test_every_law_of_the_table_is_judged_by_some_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in CONFTEST.parent.rglob("test_*.py"))
    assert [name for name in LAWS if f'pytest.mark.law("{name}")' not in tests] == []


def test_a_later_turn_is_tested_only_for_methods_that_decide_in_turns(tmp_path: Path) -> None:
    """Check that a skipped test does not leave the verdict of such a method open."""
    methods = "--kvspec-as=tova", "--kvspec-as=keydiff"
    result = run(tmp_path, "--kvspec-policy=tova", *methods, "--collect-only", str(ROOT / "conformance/policy_suite"))
    assert result.returncode == 0, result.stdout
    assert "later_turn_are_those_of_the_method[keydiff]" in result.stdout
    assert "later_turn_are_those_of_the_method[tova]" not in result.stdout
    assert "sizes_of_models[tova]" in result.stdout
