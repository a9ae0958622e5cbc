"""The scale lane (`test_scale_*.py`): full sizes, for code that runs as it is used, never for an interpreter."""

import os

import pytest

from conformance.plugin import profile_of

__all__ = ["compiled"]

# Variables that turn a compiled backend into an interpreted one, which takes hours for what takes seconds.
INTERPRETERS = ("TRITON_INTERPRET", "NUMBA_DISABLE_JIT")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: too long for CI; runs with --kvspec-profile nightly alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if profile_of(config) != "nightly":
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="too long for CI: --kvspec-profile nightly runs it"))


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skips where kernels are interpreted."""
    for name in INTERPRETERS:
        if os.environ.get(name, "0") not in ("", "0"):
            pytest.skip(f"the scale lane needs compiled code, and {name} = {os.environ[name]}")
