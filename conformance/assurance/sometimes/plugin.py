"""Counts the states of `states.py` over a whole run of the suite, all its processes together.

Stages are called through the fixture `judged`. Where the run is whole, this plugin puts itself between; it watches the
reference alone, as other backends are given the same inputs. `nox -s conformance` loads it, `kvspec verify` does not.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from conformance.paths import ROOT
from conformance.plugin import profile_of, subject_of

if TYPE_CHECKING:
    from spec.backend import Backend

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
    """The same backend, with what its calls meet counted."""
    from conformance.engine.ops import stages
    from spec.backend import FAMILIES

    families: dict[str, Any] = {
        family: SimpleNamespace(**{
            name: _stage(getattr(getattr(backend, family), name), f"{family}.{name}", met) for name in stages(family)
        }) for family in FAMILIES
    }
    return replace(backend, **families)


def _stage(stage: Callable[..., Any], op: str, met: Counter[str]) -> Callable[..., Any]:
    from conformance.assurance.sometimes.states import DERIVED, STATES
    from conformance.engine.ops import OPS
    from spec.errors import SpecError

    wanted = {f"{op}: {state}": holds for state, (_, holds) in STATES.get(op, {}).items()}
    names = ["p" if name == "parameters" else name for name in OPS[op].arguments]

    def call(*given: Any) -> Any:
        try:
            found = stage(*given)
        except SpecError as error:
            met[f"{op}: {error.argument} is refused"] += 1
            raise
        if wanted:
            view = SimpleNamespace(**dict(zip(names, given, strict=False)), found=found)
            vars(view).update(DERIVED[op](view) if op in DERIVED else {})
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
    theirs = getattr(node, "workeroutput", {}).get("kvspec_met")
    if theirs is not None:
        node.config.stash.setdefault(_met, Counter()).update(theirs)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its counts over; a whole run in which a state was never met fails."""
    met = session.config.stash.get(_met, None)
    if met is None:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kvspec_met"] = dict(met)
    elif session.exitstatus == pytest.ExitCode.OK and not met.keys() >= expected().keys():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many states were met, which least often, and which never, with its item."""
    met = config.stash.get(_met, None)
    if met is not None:
        items = expected()
        least = sorted((met[state], state) for state in items if met[state])[:3]
        terminalreporter.section("states of the decisions")
        terminalreporter.line(f"{sum(1 for state in items if met[state])} of {len(items)} were met; least often: "
                              + ", ".join(f"{state} ({count})" for count, state in least))
        for state in items:
            if not met[state]:
                terminalreporter.line(f"never met: {state} [{items[state]}]", red=True)
