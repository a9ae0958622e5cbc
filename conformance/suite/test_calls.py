"""What a result depends on: spec/implementing.md, "Calls", asked of every stage by name."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest

from conformance.calls import arrays_of
from conformance.plugin import skip_without
from conformance.strategies.one_change import CALLS, LARGE, Calls
from conformance.threads import in_turns, side_by_side
from spec.backend import Backend

Stage = Callable[..., Any]
STRIDES, SECONDS = (1, 3), 0.03

STAGES = [pytest.param(op, marks=pytest.mark.spec(calls.item), id=op) for op, calls in CALLS.items()]
CHANGES = [
    pytest.param(op, name, marks=pytest.mark.spec(calls.item), id=f"{op}-{name}")
    for op, calls in CALLS.items() for name in calls.changes
]
FAR_CHANGES = [
    pytest.param(op, calls, name, marks=pytest.mark.spec(calls.item), id=f"{op}-{name}-{at}")
    for at, (op, calls) in enumerate(LARGE) for name in calls.changes
]


def stage_of(backend: Backend, op: str) -> Stage:
    family, _, name = op.partition(".")
    skip_without(backend, family)
    stage: Stage = getattr(getattr(backend, family), name)
    return stage


def parts(value: Any) -> list[Any]:
    """All numbers of a result, arrays as bytes."""
    if isinstance(value, np.ndarray):
        return [value.shape, value.dtype, value.tobytes()]
    members = value if isinstance(value, tuple) else vars(value).values() if is_dataclass(value) else None
    return [value] if members is None else [part for one in members for part in parts(one)]


@pytest.mark.parametrize(("op", "change"), CHANGES)
def test_what_changes_is_read(judged: Backend, op: str, change: str) -> None:
    """A call, the same with one change, and the call again: other results, and the same result."""
    check_that_it_is_read(stage_of(judged, op), CALLS[op], change)


@pytest.mark.parametrize(("op", "calls", "change"), FAR_CHANGES)
def test_large_arrays_are_read_whole(judged: Backend, op: str, calls: Calls, change: str) -> None:
    """The same of arrays that agree in their first 60 KB, in their last, and in all but one number or row."""
    check_that_it_is_read(stage_of(judged, op), calls, change)


def check_that_it_is_read(stage: Stage, calls: Calls, change: str) -> None:
    same = tuple(calls.arguments.values())
    before, other, after = stage(*same), stage(*calls.changed(change)), stage(*same)
    assert parts(before) == parts(after), "the result depends on an earlier call"
    assert parts(before) != parts(other), "what changed was not read"


@pytest.mark.parametrize(("op", "change"), CHANGES)
def test_arrays_filled_anew_are_read_anew(judged: Backend, subject: Backend, op: str, change: str) -> None:
    """The caller fills the arrays of its last call with other content: as if they were others."""
    stage, calls = stage_of(subject, op), CALLS[op]
    given, wanted = deepcopy(tuple(calls.arguments.values())), calls.changed(change)
    stage(*given)
    for own, new in zip(arrays_of(given), arrays_of(wanted), strict=True):
        own[...] = new
    rest = [new if not list(arrays_of(own)) else own for own, new in zip(given, wanted, strict=True)]
    found = parts(stage(*rest))
    assert found == parts(stage(*deepcopy(wanted)))


@pytest.mark.parametrize("op", STAGES)
def test_threads_have_results_of_their_own(judged: Backend, subject: Backend, together: bool, op: str) -> None:
    """Calls of the same sizes and other contents: in turns at every line, every third, and as threads run."""
    stage, calls = stage_of(subject, op), (tuple(CALLS[op].arguments.values()), CALLS[op].all_changed)
    wanted = [parts(stage(*call)) for call in calls]
    if not together:
        return
    found = [pair for stride in STRIDES for pair in enumerate(in_turns(stage, calls, stride))]
    for at, result in [*found, *side_by_side(stage, calls, SECONDS)]:
        assert not isinstance(result, BaseException), f"a thread failed: {result!r}"
        assert parts(result) == wanted[at], "another thread's call changed the result"
