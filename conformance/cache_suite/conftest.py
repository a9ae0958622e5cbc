"""Whose cache is judged, on which model; without one there is nothing to collect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["folder", "run"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What every test here is about must be given."""
    return True if config.getoption("--kvspec-cache") is None else None


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The function of --kvspec-cache."""
    from spec.errors import SpecError
    from spec.plugins import load_own

    name = request.config.getoption("--kvspec-cache")
    found = load_own(name).value
    if not callable(found):
        raise SpecError("cache", name, f"must be a function of prompt_ids, kept, next_ids, model; is {found!r}")
    return found


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the model: the one of --kvspec-model, else a tiny one."""
    from conformance.cache_suite.judge import save_tiny

    given = request.config.getoption("--kvspec-model")
    return str(given or save_tiny(tmp_path_factory.mktemp("model")))
