"""Folders that need what is not installed are not collected: the rest needs NumPy alone."""

from collections.abc import Iterator
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings

collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["models_integration"]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Forwards of a few tokens gain nothing from threads, and lose much where the machine is busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `kvspec verify` is given no seed, each run of a test draws the same."""
    from conformance.verify import __main__ as verify_main

    monkeypatch.setattr(verify_main, "secrets", SimpleNamespace(randbelow=Random(1).randrange))


@pytest.fixture
def sparing() -> Iterator[None]:
    """Few examples: that nothing true is accused shows in any of them."""
    before = settings.default
    settings.load_profile("few")
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")
