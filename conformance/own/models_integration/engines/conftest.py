"""Tiny models on one thread: the order of sums, and so the last bits, do not depend on the machine's cores."""

import pytest


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """The fixture, for every test here."""
