"""Counts the states of `states.py` over a whole run of the suite, all its processes together.

Stages are called through the fixture `judged`. Where the run is whole, this plugin puts itself between; it watches the
reference alone, as other backends are given the same inputs. `kvspec verify` does not load it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.paths import ROOT
from conformance.plugin import profile_of, subject_of

if TYPE_CHECKING:
    from spec.backend import Backend

__all__ = ["ENOUGH", "SUITE", "expected", "watched", "whole"]

SUITE = ROOT / "conformance" / "suite"
ENOUGH = 100
"""A process looks for a state until it has met it so often."""
LEAVE_OUT = ("keyword", "markexpr", "deselect", "lf", "stepwise", "maxfail", "collectonly")
"""Options with which pytest runs a part of what it was given."""

_met = pytest.StashKey[Counter[str]]()


def whole(config: pytest.Config, collected: Iterable[Path]) -> bool:
    """Whether the reference is judged by all tests of the suite, with all examples."""
    part = any(getattr(config.option, name, None) for name in LEAVE_OUT) or any("::" in word for word in config.args)
    every = set(SUITE.glob("test_*.py")) <= set(collected)
    return every and not part and subject_of(config) == "numpy" and profile_of(config) != "few"


def expected() -> dict[str, str]:
    """All states, refusals among them, each with its item."""
    from conformance.assurance.sometimes.states import REFUSALS, STATES

    states = {f"{stage}: {state}": item for stage, rows in STATES.items() for state, (item, _) in rows.items()}
    refused = {f"{stage}: {name} is refused": item for stage, (item, names) in REFUSALS.items() for name in names}
    return states | refused


def watched(backend: "Backend", met: Counter[str]) -> "Backend":
    """The same backend, with its calls counted."""
    from spec import backend as types

    protocols = (types.CrystalStages, types.BreathStages, types.DiversityStages, types.NestedKVStages,
                 types.PolicyStages)
    families = {family: getattr(backend, family) for family in types.FAMILIES}
    return replace(backend, **{
        family: _Watched(stages, family, protocol, met)
        for (family, stages), protocol in zip(families.items(), protocols, strict=True) if stages is not None
    })


class _Watched:
    """A family whose stages are watched."""

    def __init__(self, stages: object, family: str, protocol: type, met: Counter[str]) -> None:
        for name, typed in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                parameters = [*inspect.signature(typed).parameters][1:]
                setattr(self, name, _stage(getattr(stages, name), f"{family}.{name}", parameters, met))


def _stage(stage: Callable[..., Any], name: str, parameters: list[str], met: Counter[str]) -> Callable[..., Any]:
    from conformance.assurance.sometimes.states import DERIVED, STATES, View
    from spec.errors import SpecError

    wanted = {f"{name}: {state}": holds for state, (_, holds) in STATES.get(name, {}).items()}
    names = ["p" if parameter == "parameters" else parameter for parameter in parameters]

    def call(*given: Any) -> Any:
        try:
            found = stage(*given)
        except SpecError as error:
            met[f"{name}: {error.argument} is refused"] += 1
            raise
        if wanted:
            view = View(**dict(zip(names, given, strict=False)), found=found)
            vars(view).update(DERIVED[name](view) if name in DERIVED else {})
            for state in [state for state, holds in wanted.items() if holds(view)]:
                met[state] += 1
                if met[state] == ENOUGH:
                    del wanted[state]
        return found

    return call


@pytest.fixture(scope="session")
def judged(judged: "Backend", request: pytest.FixtureRequest) -> "Backend":
    """What is judged, and in a whole run watched."""
    if not whole(request.config, {item.path for item in request.session.items}):
        return judged
    return watched(judged, request.config.stash.setdefault(_met, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of xdist has met."""
    if theirs := getattr(node, "workeroutput", {}).get("kvspec_met"):
        node.config.stash.setdefault(_met, Counter()).update(theirs)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its counts over; a whole run in which a state was never met fails."""
    met = session.config.stash.get(_met, None)
    if met and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kvspec_met"] = dict(met)
    elif met and session.exitstatus == pytest.ExitCode.OK and not met.keys() >= expected().keys():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many states were met, which least often, and which never, with its item."""
    if met := config.stash.get(_met, None):
        items = expected()
        least = sorted((met[state], state) for state in items if met[state])[:3]
        terminalreporter.section("states of the decisions")
        terminalreporter.line(f"{sum(1 for state in items if met[state])} of {len(items)} were met; least often: "
                              + ", ".join(f"{state} ({count})" for count, state in least))
        for state in items:
            if not met[state]:
                terminalreporter.line(f"never met: {state} [{items[state]}]", red=True)
