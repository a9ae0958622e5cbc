"""Whose policy is judged; without one there is nothing to collect."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conformance.strategies.policy_inputs import Inputs
    from spec.policy import Policy

__all__ = ["judged_policy"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What every test here is about must be given."""
    return True if config.getoption("--kvspec-policy") is None else None


@pytest.fixture(scope="session")
def judged_policy(request: pytest.FixtureRequest) -> "Callable[[Inputs], Policy]":
    """The policy of --kvspec-policy."""
    from conformance.strategies.policy_inputs import named

    return partial(named, request.config.getoption("--kvspec-policy"))
