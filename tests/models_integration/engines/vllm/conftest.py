"""Each test of this folder has a time limit, because an error in a worker can leave the engine waiting."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

SECONDS = 400


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Stop a test that takes longer than SECONDS."""
    def stop(*_: Any) -> None:
        raise TimeoutError(f"the test took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
