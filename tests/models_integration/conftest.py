"""Every test in this folder names its specification items or laws. A failure prints the sentences of the laws."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.laws import LAWS

HERE = Path(__file__).parent


def judged(item: pytest.Item) -> list[pytest.Mark]:
    """Return the markers of items and laws of a test.

    Markers of the test take precedence over those of its class, and those over the markers of its module.
    """
    found = [(node, mark) for node, mark in item.iter_markers_with_node() if mark.name in ("spec", "law")]
    return [mark for node, mark in found if node is found[0][0]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise an error for a test without such a marker, or with an unknown law, before tests are deselected."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if not judged(item):
            raise pytest.UsageError(f"{item.nodeid}: needs the mark spec or law (tests/laws.py)")
        for mark in item.iter_markers("law"):
            if len(mark.args) != 1 or mark.kwargs or mark.args[0] not in LAWS:
                raise pytest.UsageError(f"{item.nodeid}: unknown law {mark.args}, must be one of {', '.join(LAWS)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the broken laws to the report of a failure."""
    report = yield
    if report.failed:
        names = [str(mark.args[0]) for mark in judged(item) if mark.name == "law"]
        report.sections += [("law", f"{name}: {LAWS[name]}") for name in names]
    return report


@pytest.fixture(autouse=True)
def tiny_models_on_one_thread(request: pytest.FixtureRequest) -> None:
    """Use one thread. The order of sums, and thus the last bits, then do not depend on the number of cores."""
    if request.path.parent.name in ("session", "engines"):
        request.getfixturevalue("one_thread")
