"""Folders with missing dependencies are not collected. The remaining folders need only NumPy."""

from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings

from tests.laws import LAWS

HERE = Path(__file__).parent
MODELS = ("models_integration", "experiments", "kvspec")
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else [*MODELS]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread. Forward passes of a few tokens gain nothing from threads, and lose much on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `kvspec verify` without a seed draw the same examples in each run of a test."""
    from conformance.verify import __main__ as verify_main

    monkeypatch.setattr(verify_main, "secrets", SimpleNamespace(randbelow=Random(1).randrange))


@pytest.fixture
def sparing() -> Iterator[None]:
    """Use few examples. They suffice to show that no correct subject is rejected."""
    before = settings.default
    settings.load_profile("few")
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")


def judged(item: pytest.Item) -> list[pytest.Mark]:
    """Return the markers of items and laws of a test.

    Markers of the test take precedence over those of its class, and those over the markers of its module.
    """
    actual = [(node, mark) for node, mark in item.iter_markers_with_node() if mark.name in ("spec", "law")]
    return [mark for node, mark in actual if node is actual[0][0]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise an error for a test without such a marker, or with an unknown law, before tests are deselected."""
    for item in items:
        if not any(item.path.is_relative_to(HERE / package) for package in MODELS):
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
