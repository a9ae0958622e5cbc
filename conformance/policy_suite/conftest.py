"""Who is judged, and as which method; without a subject there is nothing to collect."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conformance.engine.process import Engine
    from conformance.policy_suite.test_method import Subject
    from conformance.strategies.policy_inputs import Inputs
    from spec.policy import Policy


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What the tests of a file are about must be given."""
    needed = {"test_method.py": ["--kvspec-as"], "test_turn.py": ["--kvspec-as", "--kvspec-policy"]}
    options = needed.get(collection_path.name, ["--kvspec-policy"])
    return True if any(config.getoption(option) is None for option in options) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case for each method, about the item that defines it."""
    if "method" in metafunc.fixturenames:
        from conformance.methods.method import method_of

        methods = map(method_of, metafunc.config.getoption("--kvspec-as"))
        metafunc.parametrize("method", [
            pytest.param(one, marks=pytest.mark.spec(one.item), id=one.name) for one in methods
        ])


@pytest.fixture(scope="session")
def judged_policy(request: pytest.FixtureRequest) -> "Callable[[Inputs], Policy]":
    """The policy of --kvspec-policy."""
    from conformance.strategies.policy_inputs import named

    given = request.config.getoption("--kvspec-as")
    like = given[0].partition("(")[0] if given else ""
    return partial(named, request.config.getoption("--kvspec-policy"), method=like)


@pytest.fixture(scope="session")
def keeps(request: pytest.FixtureRequest, method_engine: "Engine | None") -> "Subject":
    """What the subject keeps of inputs at a budget, as a method: an engine, a policy, or our policies on a backend."""
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
    """The methods of which scores were compared too."""
    return set()


@pytest.fixture(scope="session")
def explained() -> dict[str, list[str]]:
    """What explains the answers to a method, once that was asked."""
    return {}
