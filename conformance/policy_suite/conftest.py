"""Whose policy is judged; without one there is nothing to collect."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from spec.policy import Policy

__all__ = ["judged_policy"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What every test here is about must be given."""
    return True if config.getoption("--kvspec-policy") is None else None


@pytest.fixture(scope="session")
def judged_policy(request: pytest.FixtureRequest) -> "Policy":
    """The policy of --kvspec-policy."""
    from reference.policies.names import own_policy
    from spec.policy import Policy

    found = own_policy(request.config.getoption("--kvspec-policy"), "policy").value
    assert isinstance(found, Policy)
    return found
