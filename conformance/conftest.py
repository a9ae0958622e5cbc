"""Folders that need what is not installed are not collected, and what is too long for CI is left to the night."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from conformance.plugin import profile_of

collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["own/models_integration/session"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: too long for CI; runs with --kvspec-profile nightly alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if profile_of(config) != "nightly":
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="too long for CI: --kvspec-profile nightly runs it"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Forwards of a few tokens gain nothing from threads, and lose much where the machine is busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
