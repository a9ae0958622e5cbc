"""Every test here says what it judges: items of the specification, or laws, whose sentences its failure repeats."""

from collections.abc import Generator
from pathlib import Path

import pytest

from conformance.own.laws import LAWS

HERE = Path(__file__).parent


def judged(item: pytest.Item) -> list[pytest.Mark]:
    """Its markers of items and laws; a test's own stand before those of its class, and these before its module's."""
    found = [(node, mark) for node, mark in item.iter_markers_with_node() if mark.name in ("spec", "law")]
    return [mark for node, mark in found if node is found[0][0]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse what carries neither, before anything is left out, and what names a law that the table has not."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if not judged(item):
            raise pytest.UsageError(f"{item.nodeid}: needs the mark spec or law (conformance/own/laws.py)")
        for mark in item.iter_markers("law"):
            if len(mark.args) != 1 or mark.kwargs or mark.args[0] not in LAWS:
                raise pytest.UsageError(f"{item.nodeid}: unknown law {mark.args}, must be one of {', '.join(LAWS)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure says which law it breaks."""
    report = yield
    if report.failed:
        names = [str(mark.args[0]) for mark in judged(item) if mark.name == "law"]
        report.sections += [("law", f"{name}: {LAWS[name]}") for name in names]
    return report


@pytest.fixture(autouse=True)
def tiny_models_on_one_thread(request: pytest.FixtureRequest) -> None:
    """The order of sums, and so the last bits, do not depend on the machine's cores."""
    if request.path.parent.name in ("session", "engines"):
        request.getfixturevalue("one_thread")
