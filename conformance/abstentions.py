"""Skips for which kvspec decides a state, such as "not served".

The state is an attribute of the exception. It is never read from the reason of a skip, because a reason may contain
words of a server or of an engine.
"""

from typing import Any, Literal, NoReturn

import pytest

State = Literal["not offered", "not served", "not promised", "N/A"]


def abstain(state: State, reason: str) -> NoReturn:
    """Skip the test, and give the test a state of `conformance.verify.outcomes`. The reason is only shown."""
    __tracebackhide__ = True
    skipped: Any = pytest.skip.Exception(reason)
    skipped.kvspec_state = state
    raise skipped


def abstention(error: BaseException | None) -> str:
    """Return the state that `abstain` gave to an exception, or "" for any other exception."""
    return str(getattr(error, "kvspec_state", ""))
