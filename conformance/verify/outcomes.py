"""Verdicts of tests, items and vectors, and the texts of the rows of a certificate."""

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from conformance.checks.promises import PROPERTIES
from conformance.exceptions import items_marked
from conformance.items import items_of
from conformance.methods.method import METHOD_ITEMS
from conformance.methods.method import METHODS as COMPARED
from conformance.paths import SPEC
from conformance.plugin import NOT_OFFERED, precision_of, spec_of
from spec.backend import FAMILIES

COMPOSED = "compositions"
"""Family of items that belong to no stage family.

Compositions are the same code for every engine and call the stages of the engine.
"""

METHODS, PROMISES = "methods", "promises"
"""Family of the items of published methods, and family of the properties of a policy."""
EVICTION = "say behind a compacted cache what the model says where the evicted tokens are masked."

SERVER = {
    "server: size": "keep no more tokens than the budget.",
    "server: masking": "answer as the model with the full cache answers if the evicted tokens are masked.",
    "server: eviction": "answer otherwise than the model with the full cache.",
    "server: policy": "keep the tokens that the stated policy keeps.",
    "server: commitment": "fix the kept set before the first answer token that depends on the set.",
}
"""Requirements for a server, from spec/witness.md."""

_ROW = re.compile(r"^\| (\w+) \| `\w+` \| ((?:[A-Z]+-[A-Z0-9-]+(?:, )?)+) \|$", re.MULTILINE)
_FORMULA = re.compile(r"\*\*Formula\*\*(.*?)\n\n", re.DOTALL)
_MUST = re.compile(r"\*\*MUST\*\*(.*?)(?=\n\*\*|\Z)", re.DOTALL)
_SENTENCES = re.compile(r"(?<=[.;:])\s+(?=[A-Z`])")
_LONGEST = 240
_REFUSAL = re.compile(r"refus|SpecError")
_NOT_REFUSED = re.compile(r"refus|DID NOT RAISE")
"""Patterns for sentences that demand an error, and for tests of errors by name or failure text."""


@cache
def families() -> dict[str, list[str]]:
    """Return the items of each stage family, from the table in spec/implementing.md."""
    result: dict[str, list[str]] = {}
    for family, names in _ROW.findall((SPEC / "implementing.md").read_text(encoding="utf-8")):
        items = result.setdefault(family, [])
        items += [name for name in names.split(", ") if name not in items]
    return result


@cache
def _places() -> dict[str, int]:
    return {item: at for at, item in enumerate(dict.fromkeys(item for row in families().values() for item in row))}


def _place(item: str) -> tuple[int, str]:
    """Return a sort key for items: the order of the table of stages, then all other items by name."""
    return _places().get(item, len(_places())), item


def families_of(item: str) -> list[str]:
    """Return the families of an item.

    These are the stage families that contain the item. The family of a property is `promises`. The row `server: size`
    belongs to the family before the colon. All other items belong to `methods` or `compositions`.
    """
    if item in PROPERTIES:
        return [PROMISES]
    family, of_a_cache, _ = item.partition(": ")
    if of_a_cache:
        return [family]
    published = item in METHOD_ITEMS and item != COMPARED["crystalcache"].item  # CrystalCache is composed of stages
    return [name for name, own in families().items() if item in own] or [METHODS if published else COMPOSED]


@cache
def _texts() -> dict[str, str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(SPEC.glob("*.md"))]
    return {name: text for page in pages for name, text in items_of(page)}


def formula(item: str) -> str:
    """Return the equation of an item on one line, or "" if the item has none."""
    match = _FORMULA.search(_texts().get(item, ""))
    return " ".join(match[1].split()) if match else ""


def must(item: str, row: Mapping[str, Any] | None = None) -> str:
    """Return the requirement of a row on one line.

    For an item, these are its first sentences. If a test of an error fails, these are the sentences that demand an
    error.
    """
    if item in PROPERTIES or ": " in item:
        return PROPERTIES[item].says if item in PROPERTIES else SERVER.get(item, EVICTION)
    result = [_SENTENCES.split(" ".join(text.split())) for text in _MUST.findall(_texts().get(item, ""))]
    if not result:
        return ""
    if row and _NOT_REFUSED.search(f"{row.get('test')} {row.get('found')}"):
        refusals = [sentence for sentences in result for sentence in sentences if _REFUSAL.search(sentence)]
        result = [refusals, *result] if refusals else result
    text = " ".join(result[0][:2])
    return text if len(text) <= _LONGEST else result[0][0][:_LONGEST]


# States of tests, items and vectors. The state of an item is the first of STATES that one of its tests has.
ABSTAINED = ("not served", "not promised", "N/A")
"""States of rows without a verdict.

The cache does not support the input, or the policy does not promise the property.
"""
STATES = ("failed", "excepted", *ABSTAINED, "passed", "not offered", "not run")
WORDS = {"failed": "fail", "passed": "pass"}

_VECTOR = re.compile(r"test_vectors\.py::test_the_backend_holds_a_vector_of_a_stage\[(.+)\]")


@dataclass(frozen=True)
class Outcome:
    """Result of one test, with the items of the test."""

    test: str
    items: list[str]
    exceptions: list[str]
    state: str
    examples: int = 0
    reason: str = ""
    input: str = ""
    found: str = ""

    @property
    def vector(self) -> str:
        """Return the id of the vector that the test compares, or ""."""
        match = _VECTOR.fullmatch(self.test)
        return match[1] if match else ""


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of a run. `name` is the name that the engine reports."""

    name: str
    precision: str
    families: list[str]
    items: dict[str, str]
    vectors: dict[str, str]
    unneeded: list[str]
    outcomes: list[Outcome]
    smallest: dict[str, Outcome] = field(default_factory=dict)
    scored: list[str] = field(default_factory=list)
    """Methods whose scores were compared in addition to the kept sets."""
    at_once: int = 0
    """Maximum number of requests that a server ran at the same time."""
    written_for: str = ""
    """Version of the specification that an engine reports in its hello message."""

    @property
    def failing(self) -> list[str]:
        """Return the failing items, the most specific failures first.

        An item comes first if its smallest failing test covers few items, then if many tests of the item fail. Items
        with the same failing tests keep the order in which the test names the items.
        """
        times = Counter(item for one in self.outcomes if one.state == "failed" for item in one.items)
        few = {item: (len(one.items), -times[item], one.items.index(item), item) for item, one in self.smallest.items()}
        return sorted(few, key=few.__getitem__)

    @property
    def missing(self) -> list[str]:
        """Return the items of the offered families without a verdict, or with a test that did not run.

        Failing items are left out. A method has several tests, and `--fail-fast` runs no test after a failure.
        """
        skipped = {item for one in self.outcomes if one.state == "not run" for item in one.items} - {*self.smallest}
        return [item for item in self._offered if item in skipped or self.items[item] in ("not run", "not offered")]

    @property
    def unproven(self) -> list[str]:
        """Return the items of the offered families that are excepted and have no passed test."""
        proven = {item for one in self.outcomes if one.state == "passed" for item in one.items}
        return [item for item in self._offered if self.items[item] == "excepted" and item not in proven]

    @property
    def _offered(self) -> list[str]:
        return sorted(item for item in self.items if not set(self.families).isdisjoint(families_of(item)))

    @property
    def unfailing(self) -> bool:
        """Return True if no test fails and every item of the offered families has a verdict."""
        return bool(self.families) and not self.missing and all(one.state != "failed" for one in self.outcomes)

    @property
    def certified(self) -> bool:
        """Return True if the run is `unfailing` and no excepted item lacks a passed test."""
        return self.unfailing and not self.unproven


def outcomes_of(lines: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """Return the outcomes of all collected tests.

    If the process ended during a test, this test has failed. The later tests did not run.
    """
    tests: dict[str, Any] = {}
    notes: dict[str, Mapping[str, Any]] = {}
    began, ended = "", 0
    for line in lines:
        tests |= line.get("collected", {})
        began, ended = line.get("began", began), line.get("ended", ended)
        if "test" in line and notes.get(line["test"], {}).get("state") != "failed":
            notes[line["test"]] = line
    if began and began not in notes:
        death = f"the process ended with {ended} in this test" if ended >= 0 else f"signal {-ended} ended the process"
        notes[began] = {"state": "failed", "failure": {"input": "", "found": death}}
    return [_outcome(test, about, notes.get(test, {})) for test, about in tests.items()]


def _outcome(test: str, about: Mapping[str, Any], line: Mapping[str, Any]) -> Outcome:
    state, examples = line.get("state", "not run"), line.get("examples", 0)
    if state == "skipped" or (state == "passed" and not examples):
        state = "not run"
    return Outcome(
        test, about["items"], about["exceptions"], state, examples, line.get("reason", ""),
        **(line.get("failure") or {}),
    )


def _verdict(outcomes: Iterable[Outcome]) -> str:
    state = min((one.state for one in outcomes), key=STATES.index, default="not run")
    return WORDS.get(state, state)


def _smallest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the failure that describes its item best: the test of the fewest items, then the shortest text."""
    wrong = [one for one in outcomes if one.state == "failed"]
    return min(wrong, key=lambda one: (len(one.items), not one.input, len(one.input) + len(one.found), one.test))


def verdicts_of(lines: list[dict[str, Any]], exceptions: Iterable[str] = (), engine: bool = True) -> Verdicts:
    """Return the verdicts of a run from its lines.

    Args:
        lines: lines that the recorder wrote.
        exceptions: subjects of the exceptions file.
        engine: True for an engine, False for a policy, cache or server.
    """
    outcomes = outcomes_of(lines)
    name, offered = next(((line["name"], line["families"]) for line in lines if line.get("families")), ("", []))
    precision = next((line["precision"] for line in lines if "precision" in line), "")
    written_for = next((line["spec"] for line in lines if "spec" in line), "")
    marked = list(dict.fromkeys(item for one in outcomes for item in one.items))
    if engine:
        marked = sorted({*marked, *(item for row in families().values() for item in row)}, key=_place)
    about = {item: [one for one in outcomes if item in one.items] for item in marked}
    items = {item: _verdict(tests) for item, tests in about.items()}
    if not engine:
        decided = [item for item, verdict in items.items() if verdict in WORDS.values()]
        offered = list(dict.fromkeys(family for item in decided for family in families_of(item)))
    needed = {name for one in outcomes if one.state in ("excepted", "failed", "not run") for name in one.exceptions}
    return Verdicts(
        name, precision, offered, items, {one.vector: _verdict([one]) for one in outcomes if one.vector},
        sorted(set(exceptions) - needed), outcomes,
        {item: _smallest(about[item]) for item, verdict in items.items() if verdict == "fail"},
        sorted({method for line in lines for method in line.get("scored", ())}),
        max((line.get("at_once", 0) for line in lines), default=0), written_for,
    )


_NAME = re.compile(r"[^\W\d]\w*")
_PASSING = re.compile(r"(\d+) passing")
_EXAMPLE = re.compile(r"\A(?:Falsifying|Failing)[ \w]*:\s*")
_MORE = re.compile(r"\n +\+ +(?:where|and) .*|\n\s*\n.*", re.DOTALL)
_ARGUMENTS = re.compile(r"\n(?=    \w+=)")
_LINES, _WIDTH = 24, 240
_NONE: Mapping[str, Any] = {}
_SHOWN = (bool, int, float, str, list, tuple, np.ndarray)
_TELLING = 40
"""Minimum length of an assertion's message that is shown without the asserted statement. `False` is too short."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("kvspec").addoption(
        "--kvspec-outcomes", type=_inherited, metavar="NUMBER", help="inherited socket for the result of each test",
    )


def _inherited(text: str) -> int:
    """Return an inherited file descriptor, after making it non-inheritable for the children of this process."""
    os.set_inheritable(int(text), False)  # Set before a plugin starts an engine.
    return int(text)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the Hypothesis profile of `kvspec verify`, and the recorder of outcomes.

    Examples depend only on the test and the seed. Nothing is stored between runs.
    """
    settings.register_profile(
        "verify", settings.default, derandomize=config.getoption("--hypothesis-seed") is None, database=None,
        print_blob=False, phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("verify")
    descriptor = config.getoption("--kvspec-outcomes")
    if descriptor is not None:
        config.pluginmanager.register(Recorder(descriptor))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: tests of an item before tests of items composed of it, and full-size inputs last.

    The item of a test is the first item that the test names.
    """
    items.sort(key=_order)


def _order(item: pytest.Item) -> tuple[bool, int, int]:
    marked = items_marked(item)
    # Tests that share a prompt run together, so the prompt is computed once.
    if "compiled" in getattr(item, "fixturenames", ()):
        return True, 0, 0
    return False, _place(marked[0])[0] if marked else len(_places()), len(marked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the number of examples, the families, the failure and other facts to a report."""
    report = yield
    drawn = getattr(item, "hypothesis_statistics", None)
    given, names = getattr(item, "funcargs", {}), getattr(item, "fixturenames", [])
    judged = given.get("judged")
    params = getattr(getattr(item, "callspec", None), "params", {})
    record = {
        "examples": 1 if drawn is None else sum(map(int, _PASSING.findall(drawn))),
        "name": getattr(judged, "name", ""), "scored": sorted(given.get("scored", ())),
        "at_once": given.get("at_once", {}).get("requests", 0),
        "families": [family for family in FAMILIES if getattr(judged, family, None) is not None],
        "failure": failure(call.excinfo.value, names, params) if call.excinfo and report.outcome == "failed" else None,
    }
    report.user_properties.append(("kvspec", record))
    return report


def failure(error: BaseException, fixtures: Iterable[str], params: Mapping[str, Any] = _NONE) -> dict[str, str]:
    """Return the failing input and the failure message, both cut to the maximum size.

    The input is Hypothesis's example without the fixtures, or the parameters of the test case.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    notes = [note for note in getattr(error, "__notes__", ()) if _EXAMPLE.match(note)]
    result = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    if len(result.partition("\n")[0]) > _TELLING:
        result = _MORE.sub("", result)
    if isinstance(error, AssertionError) and len(result.partition("\n")[0]) <= _TELLING:
        statement = _statement(error)
        result = "\n".join([result.partition("\n")[0], *statement] if statement else [result])
    begin = tuple(f"    {name}=" for name in fixtures)
    drawn = [part for note in notes[:1] for part in _ARGUMENTS.split(note) if not part.startswith(begin)]
    return {
        "input": cut(_EXAMPLE.sub("", "\n".join(drawn or _case(params)))), "found": cut(result or "AssertionError"),
    }


def _statement(error: BaseException) -> list[str]:
    """Return the statement of an assertion without a message, and the values of the names in the statement."""
    traceback = pytest.ExceptionInfo.from_exception(error).traceback if error.__traceback__ else []
    statement = " ".join(str(traceback[-1].statement).split()) if traceback else ""
    if not statement.startswith("assert "):
        return []
    known = traceback[-1].locals
    names = [name for name in dict.fromkeys(_NAME.findall(statement)) if isinstance(known.get(name), _SHOWN)]
    return [f"must hold: {statement.removeprefix('assert ')}", *(f"{name} = {_repr(known[name])}" for name in names)]


def _case(params: Mapping[str, Any]) -> list[str]:
    """Return the parameters of a test case, a line each. For a vector, return its parameters and inputs."""
    test = params.get("test")
    if isinstance(test, Mapping) and {"tcId", "inputs"} <= test.keys():
        group = params["group"]
        params = {"vector": f"{group['operation']}-{test['tcId']}", "parameters": group["parameters"], **test["inputs"]}
    return [f"    {name}={_repr(value)}" for name, value in params.items()]


def _repr(value: Any) -> str:
    return " ".join(repr(value).split())


def cut(text: str) -> str:
    """Return the first lines of a text, with each line cut to the maximum width."""
    lines = ["".join(c if c.isprintable() else "?" for c in line)
             for line in text.encode("utf-8", "backslashreplace").decode().expandtabs().splitlines()]
    short = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines[:_LINES]]
    return "\n".join([*short, "..."] if len(lines) > _LINES else short)


def state_of(report: pytest.TestReport) -> str:
    """Return the state of the test that a report describes."""
    if report.outcome != "skipped":
        return report.outcome
    if hasattr(report, "wasxfail") or any(kind == "skip" for kind, _ in report.user_properties):
        return "excepted"
    if NOT_OFFERED in reason_of(report):
        return "not offered"
    return next((state for state in ABSTAINED if f": {state}" in reason_of(report)), "skipped")


def rows_of(item: pytest.Item) -> list[str]:
    """Return the certificate rows of a test: the rows that the test names, otherwise the items of the test."""
    return [name for mark in item.iter_markers("row") for name in mark.args] or items_marked(item)


def reason_of(report: pytest.TestReport) -> str:
    """Return the reason why a test was skipped, or ""."""
    return cut(report.longrepr[2].removeprefix("Skipped: ")) if isinstance(report.longrepr, tuple) else ""


class Recorder:
    """Plugin of pytest that writes a line for each event to the inherited socket."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)

    def write(self, **line: Any) -> None:
        self.socket.sendall(json.dumps(line).encode() + b"\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Write the collected tests before the first test. If the collection fails, nothing is written."""
        self.write(precision=precision_of(session.config), spec=spec_of(session.config), collected={
            item.nodeid: {
                "items": rows_of(item),
                "exceptions": [subject for kind, subject in item.user_properties if kind in ("skip", "xfail")],
            } for item in session.items
        })

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write one line for each test: the result of the call, or an error of the setup or the teardown."""
        if report.when == "call" or not report.passed:
            note: Any = dict(report.user_properties)["kvspec"]
            self.write(test=report.nodeid, state=state_of(report), reason=reason_of(report), **note)
