"""A pytest plugin for a judged run alone: examples by the seed, and what became of each test, as JSON lines.

    {"precision": "float32", "spec": "", "collected": {...}}   what S1 is judged in; the specification that an engine
                                                           names; items and exceptions of each test
    {"began": "test_score.py::test_x[1]"}                  so that the last one is known where the process dies
    {"test": ..., "state": "passed", "reason": "", "examples": 50, "name": "mine", "families": [...], "failure": null}
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from conformance.exceptions import items_marked
from conformance.plugin import NOT_OFFERED, precision_of, spec_of
from conformance.verify.verdicts import ABSTAINED
from spec.backend import FAMILIES

__all__ = ["Recorder"]

_NAME = re.compile(r"[^\W\d]\w*")
_PASSING = re.compile(r"(\d+) passing")
_EXAMPLE = re.compile(r"\A(?:Falsifying|Failing)[ \w]*:\s*")
_MORE = re.compile(r"\n +\+ +(?:where|and) .*|\n\s*\n.*", re.DOTALL)
_ARGUMENTS = re.compile(r"\n(?=    \w+=)")
_LINES, _WIDTH = 24, 240
_NONE: Mapping[str, Any] = {}
_SHOWN = (bool, int, float, str, list, tuple, np.ndarray)
_TELLING = 40
"""Letters of an assertion that says what was found by itself: `assert False` does not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("kvspec").addoption("--kvspec-outcomes", type=Path, help="the file of what became of each test")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Examples are a function of the test, or of the seed and the test; nothing is stored between runs."""
    settings.register_profile(
        "verify", settings.default, derandomize=config.getoption("--hypothesis-seed") is None, database=None,
        print_blob=False, phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("verify")
    file = config.getoption("--kvspec-outcomes")
    if file:
        config.pluginmanager.register(Recorder(file))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a report does not say by itself goes along with it."""
    report = yield
    drawn = getattr(item, "hypothesis_statistics", None)
    judged, names = getattr(item, "funcargs", {}).get("judged"), getattr(item, "fixturenames", [])
    params = getattr(getattr(item, "callspec", None), "params", {})
    said = {
        "examples": 1 if drawn is None else sum(map(int, _PASSING.findall(drawn))),
        "name": getattr(judged, "name", ""),
        "families": [family for family in FAMILIES if getattr(judged, family, None) is not None],
        "failure": failure(call.excinfo.value, names, params) if call.excinfo and report.outcome == "failed" else None,
    }
    report.user_properties.append(("kvspec", said))
    return report


def failure(error: BaseException, fixtures: Iterable[str], params: Mapping[str, Any] = _NONE) -> dict[str, str]:
    """The input that Hypothesis found, without fixtures, or the case's parameters; and what went wrong; both cut."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    notes = [note for note in getattr(error, "__notes__", ()) if _EXAMPLE.match(note)]
    found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    if len(found.partition("\n")[0]) > _TELLING:
        found = _MORE.sub("", found)
    if isinstance(error, AssertionError) and len(found.partition("\n")[0]) <= _TELLING:
        statement = _statement(error)
        found = "\n".join([found.partition("\n")[0], *statement] if statement else [found])
    begin = tuple(f"    {name}=" for name in fixtures)
    drawn = [part for note in notes[:1] for part in _ARGUMENTS.split(note) if not part.startswith(begin)]
    return {
        "input": cut(_EXAMPLE.sub("", "\n".join(drawn or _case(params)))), "found": cut(found or "AssertionError"),
    }


def _statement(error: BaseException) -> list[str]:
    """What a bare assertion demands, and the values of the names in it."""
    traceback = pytest.ExceptionInfo.from_exception(error).traceback if error.__traceback__ else []
    statement = " ".join(str(traceback[-1].statement).split()) if traceback else ""
    if not statement.startswith("assert "):
        return []
    known = traceback[-1].locals
    names = [name for name in dict.fromkeys(_NAME.findall(statement)) if isinstance(known.get(name), _SHOWN)]
    return [f"must hold: {statement.removeprefix('assert ')}", *(f"{name} = {_repr(known[name])}" for name in names)]


def _case(params: Mapping[str, Any]) -> list[str]:
    """The parameters of a case; of a vector its parameters and inputs."""
    test = params.get("test")
    if isinstance(test, Mapping) and {"tcId", "inputs"} <= test.keys():
        group = params["group"]
        params = {"vector": f"{group['operation']}-{test['tcId']}", "parameters": group["parameters"], **test["inputs"]}
    return [f"    {name}={_repr(value)}" for name, value in params.items()]


def _repr(value: Any) -> str:
    return " ".join(repr(value).split())


def cut(text: str) -> str:
    """The first lines, none longer than a line may be."""
    lines = ["".join(c if c.isprintable() else "?" for c in line)
             for line in text.encode("utf-8", "backslashreplace").decode().expandtabs().splitlines()]
    short = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines[:_LINES]]
    return "\n".join([*short, "..."] if len(lines) > _LINES else short)


def state_of(report: pytest.TestReport) -> str:
    """What a report says of its test."""
    if report.outcome != "skipped":
        return report.outcome
    if hasattr(report, "wasxfail") or any(kind == "skip" for kind, _ in report.user_properties):
        return "excepted"
    if NOT_OFFERED in reason_of(report):
        return "not offered"
    return next((state for state in ABSTAINED if f": {state}" in reason_of(report)), "skipped")


def rows_of(item: pytest.Item) -> list[str]:
    """The rows of the certificate that a test is about: those that it names, else its items."""
    return [name for mark in item.iter_markers("row") for name in mark.args] or items_marked(item)


def reason_of(report: pytest.TestReport) -> str:
    """Why a test was skipped."""
    return cut(report.longrepr[2].removeprefix("Skipped: ")) if isinstance(report.longrepr, tuple) else ""


class Recorder:
    """Writes the lines."""

    def __init__(self, file: Path) -> None:
        self.lines = file.open("w", encoding="utf-8", buffering=1)

    def write(self, **line: Any) -> None:
        self.lines.write(json.dumps(line) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Before the first test; never where the collection is refused."""
        self.write(precision=precision_of(session.config), spec=spec_of(session.config), collected={
            item.nodeid: {
                "items": rows_of(item),
                "exceptions": [subject for kind, subject in item.user_properties if kind in ("skip", "xfail")],
            } for item in session.items
        })

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line a test: its call, or what kept it from being called, or broke after it."""
        if report.when == "call" or not report.passed:
            said: Any = dict(report.user_properties)["kvspec"]
            self.write(test=report.nodeid, state=state_of(report), reason=reason_of(report), **said)
