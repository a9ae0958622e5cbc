"""Folders with missing dependencies are not collected. The remaining folders need only NumPy."""

from collections.abc import Iterator
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings

collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["models_integration"]


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
