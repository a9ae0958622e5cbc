"""Fixtures of the policy under test and of the methods with which it is compared."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.engine.process import Engine
    from conformance.policy_suite.test_method import Subject
    from conformance.strategies.policy_inputs import Inputs
    from spec.policy import Policy


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a file of tests if an option that the file needs is missing."""
    needed = {"test_method.py": ["--kvspec-as"], "test_turn.py": ["--kvspec-as", "--kvspec-policy"]}
    options = needed.get(collection_path.name, ["--kvspec-policy"])
    return True if any(config.getoption(option) is None for option in options) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect a test of several segments for methods without such segments.

    A later turn needs a method that reads only the stored tokens and the queries of the turn.
    """
    turn_items: list[Any] = [item for item in items if item.path.name == "test_turn.py"]
    segments = {"test_sequences_that_decode_in_turn_do_not_share_data": "decodes"}
    others = {
        item for item in turn_items
        if not getattr(item.callspec.params["method"], segments.get(item.originalname, "decides_in_turns"))
    }
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests by method. Each case has a mark with the spec item of the method."""
    if "method" in metafunc.fixturenames:
        from conformance.methods.method import method_of

        methods = map(method_of, metafunc.config.getoption("--kvspec-as"))
        metafunc.parametrize("method", [
            pytest.param(one, marks=pytest.mark.spec(one.item), id=one.name) for one in methods
        ])


@pytest.fixture(scope="session")
def judged_policy(request: pytest.FixtureRequest) -> "Callable[[Inputs], Policy]":
    """Return the policy of --kvspec-policy, as a function of the inputs."""
    from conformance.methods.method import method_of
    from conformance.strategies.policy_inputs import named

    given = request.config.getoption("--kvspec-as")
    like = method_of(given[0]).name if given else ""
    return partial(named, request.config.getoption("--kvspec-policy"), method=like)


@pytest.fixture(scope="session")
def keeps(request: pytest.FixtureRequest, method_engine: "Engine | None") -> "Subject":
    """Return the function under test, which maps a method, inputs and a budget to kept sets.

    The function calls an engine, a policy, or the policies of kvspec on a backend.
    """
    from conformance.methods.method import asked, on_backend
    from conformance.strategies.policy_inputs import decided

    if method_engine is not None:
        return partial(asked, method_engine)
    backend = request.config.getoption("--backend")
    if backend is not None:
        return partial(on_backend, backend)
    judged = request.getfixturevalue("judged_policy")
    return lambda method, inputs, B: decided(judged(inputs), inputs, B)


@pytest.fixture(scope="session")
def scored() -> set[str]:
    """Return a set for the names of the methods whose scores were compared."""
    return set()


@pytest.fixture(scope="session")
def explained() -> dict[str, list[str]]:
    """Return a cache of the results of `reasons`, by method."""
    return {}
