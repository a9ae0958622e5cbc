"""Pytest plugin of `kvspec verify`: the order of the tests, and a line for each result on an inherited socket."""

import json
import os
import re
import socket
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from conformance.abstentions import abstention
from conformance.checks.failing_input import code_of
from conformance.exceptions import items_marked
from conformance.plugin import precision_of, spec_of
from conformance.verify.outcomes import place
from spec.backend import FAMILIES
from spec.printing import printable_lines

_NAME = re.compile(r"[^\W\d]\w*")
_PASSING = re.compile(r"(\d+) passing")
_EXAMPLE = re.compile(r"\A(?:Falsifying|Failing)[ \w]*:\s*")
_MORE = re.compile(r"\n +\+ +(?:where|and) .*|\n\s*\n.*", re.DOTALL)
_ARGUMENTS = re.compile(r"\n(?=    \w+=)")
_LINES, _WIDTH = 24, 1000
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
    return False, place(marked[0] if marked else "")[0], len(marked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the number of examples, the families, the failure, the state and other facts to a report."""
    report = yield
    drawn = getattr(item, "hypothesis_statistics", None)
    given, names = getattr(item, "funcargs", {}), getattr(item, "fixturenames", [])
    backend_under_test = given.get("backend_under_test")
    params = getattr(getattr(item, "callspec", None), "params", {})
    record = {
        "examples": 1 if drawn is None else sum(map(int, _PASSING.findall(drawn))),
        "name": getattr(backend_under_test, "name", ""), "scored": sorted(given.get("scored", ())),
        "at_once": given.get("at_once", {}).get("requests", 0),
        "answer_tokens": given.get("answer_tokens", {}).get("count", 0),
        "families": [family for family in FAMILIES if getattr(backend_under_test, family, None) is not None],
        "failure": failure(call.excinfo.value, names, params) if call.excinfo and report.outcome == "failed" else None,
    }
    report.user_properties.append(("kvspec", record))
    report.user_properties.append(("state", abstention(call.excinfo.value if call.excinfo else None) or "skipped"))
    return report


def failure(error: BaseException, fixtures: Iterable[str], params: Mapping[str, Any] = _NONE) -> dict[str, str]:
    """Return the failing input and the failure message, both cut to the maximum size.

    The input is the code that the test gives with `note_code`. Otherwise the input is Hypothesis's example without the
    fixtures, or the parameters of the test case.
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
        "input": cut(code_of(error) or _EXAMPLE.sub("", "\n".join(drawn or _case(params)))),
        "found": cut(result or "AssertionError"),
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
    whole = text.encode("utf-8", "backslashreplace").decode().expandtabs()
    lines = [printable_lines(line) for line in whole.splitlines()]
    short = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines[:_LINES]]
    return "\n".join([*short, "..."] if len(lines) > _LINES else short)


def state_of(report: pytest.TestReport) -> str:
    """Return the state of the test that a report describes. The reason of a skip decides nothing."""
    if report.outcome != "skipped":
        return report.outcome
    if hasattr(report, "wasxfail") or any(kind == "skip" for kind, _ in report.user_properties):
        return "excepted"
    return str(dict(report.user_properties)["state"])


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
