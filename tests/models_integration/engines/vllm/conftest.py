"""Each test of this folder has a time limit, because an error in a worker can leave the engine waiting."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

SECONDS, AT_NIGHT = 900, 2400


@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop a test that takes longer than SECONDS, or AT_NIGHT."""
    seconds = AT_NIGHT if request.node.get_closest_marker("nightly") else SECONDS

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
