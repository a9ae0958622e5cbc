"""Stages that compute what they should and are wrong all the same: the boundary finds each, and leaves right ones."""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.calls import held_to_rules
from conformance.threads import in_turns, side_by_side
from reference.backend import BACKEND
from spec.parameters import PAPER

pytestmark = [pytest.mark.law("the-proof-has-teeth")]

Array = np.ndarray[Any, Any]
Decay = Callable[[Array, Array, Any], Array]
RIGHT: Decay = BACKEND.require_breath().decay
BUFFER, SCRATCH = np.zeros(1_000), np.zeros(1_000)
MEMORY: dict[Any, Array] = {}


def reused(D: Array, M: Array, p: Any) -> Array:
    BUFFER[: len(D)] = RIGHT(D, M, p)
    return BUFFER[: len(D)]


def by_pointer(D: Array, M: Array, p: Any) -> Array:
    key = D.__array_interface__["data"][0], len(D)
    if key not in MEMORY:
        MEMORY[key] = RIGHT(D, M, p)
    return MEMORY[key].copy()


def by_identity(D: Array, M: Array, p: Any) -> Array:
    """By the arrays themselves, of which it keeps the last."""
    if MEMORY.get("D") is not D or MEMORY.get("M") is not M:
        MEMORY.update(D=D, M=M, found=RIGHT(D, M, p))
    return MEMORY["found"].copy()


def by_shape_when_large(D: Array, M: Array, p: Any) -> Array:
    return RIGHT(D, M, p) if len(D) < 500 else MEMORY.setdefault(len(D), RIGHT(D, M, p)).copy()


def by_content(D: Array, M: Array, p: Any) -> Array:
    key = D.tobytes(), M.tobytes()
    return MEMORY.setdefault(key, RIGHT(D, M, p))


def not_to_be_written(D: Array, M: Array, p: Any) -> Array:
    found = RIGHT(D, M, p)
    found.flags.writeable = False
    return found


def argument_locked(D: Array, M: Array, p: Any) -> Array:
    D.flags.writeable = False
    return RIGHT(D, M, p)


def argument_written(D: Array, M: Array, p: Any) -> Array:
    if D.flags.writeable:
        D[0] = 0.25
    return RIGHT(D, M, p)


def shared_scratch(D: Array, M: Array, p: Any) -> Array:
    SCRATCH[: len(D)] = M
    before = np.zeros_like(D)
    for at, one in enumerate(D):  # the work of a real stage, during which another thread may write
        before[at] = one
    return RIGHT(before, SCRATCH[: len(D)].copy(), p)


def order_of_memory(D: Array, M: Array, p: Any) -> Array:
    """Reads its rows where they would be if the array were contiguous."""
    flat = M if M.strides[0] == 8 else np.lib.stride_tricks.as_strided(M[:1], M.shape, (0,))
    return RIGHT(D, flat, p)


def quiet(D: Array, M: Array, p: Any) -> Array:
    np.seterr(under="raise" if np.geterr()["under"] == "ignore" else "ignore")
    return RIGHT(D, M, p)


def seeded(D: Array, M: Array, p: Any) -> Array:
    np.random.random()
    return RIGHT(D, M, p)


def reseeded(D: Array, M: Array, p: Any) -> Array:
    np.random.seed(0)
    return RIGHT(D, M, p)


def announced(D: Array, M: Array, p: Any) -> Array:
    os.environ["KVSPEC_CALLED"] = "yes"
    return RIGHT(D, M, p)


def drawn(D: Array, M: Array, p: Any) -> Array:
    random.random()
    return RIGHT(D, M, p)


def told(D: Array, M: Array, p: Any) -> Array:
    os.environ["KVSPEC_CALLS"] = str(int(os.environ.get("KVSPEC_CALLS", "0")) + 1)
    return RIGHT(D, M, p)


VALUES = "array_equal"  # the wrong result itself
WRONG: Mapping[Decay, str] = {
    reused: "returned the memory|changed the result", by_pointer: VALUES, by_identity: VALUES,
    by_shape_when_large: VALUES, by_content: "returned",
    not_to_be_written: "read-only", argument_locked: "flags.writeable", argument_written: "wrote into an argument",
    shared_scratch: VALUES, order_of_memory: VALUES, quiet: "NumPy's error state", seeded: "NumPy's random state",
    reseeded: "NumPy's random state", drawn: "the random state", told: "the environment",
    announced: "the environment",
}


def judge(stage: Decay) -> None:
    """Calls as tests make them: of 64 to 119 trunks, ten times as many, and a few of 600; each is compared."""
    stages = held_to_rules(replace(BACKEND, breath=SimpleNamespace(decay=stage))).require_breath()
    numbers, size = np.random.default_rng(5), 0
    for at in range(400):
        size = int(numbers.integers(64, 120)) if at % 10 == 0 else size
        m = 600 if at % 40 == 39 else size
        D, M = numbers.random(m), 15 * numbers.random(m)
        kept = D.copy(), M.copy()
        assert np.array_equal(stages.decay(D, M, PAPER), RIGHT(*kept, PAPER))
        assert np.array_equal(D, kept[0])


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the wrong ones change in this process; nothing here has types of which samples are checked."""
    monkeypatch.setattr("conformance.calls.checkers_draw", lambda: False)
    for name in ("KVSPEC_CALLS", "KVSPEC_CALLED"):
        monkeypatch.delenv(name, raising=False)
    MEMORY.clear()
    with np.errstate():
        yield


@pytest.mark.parametrize("stage", WRONG, ids=lambda stage: stage.__name__)
def test_what_is_wrong_beside_the_result_is_found(stage: Decay) -> None:
    with pytest.raises(AssertionError, match=WRONG[stage]):
        judge(stage)


@pytest.mark.parametrize("stride", [1, 3])
def test_a_scratch_array_of_all_threads_is_found(stride: int) -> None:
    m = 6
    calls = (np.full(m, 0.5), np.ones(m), PAPER), (np.full(m, 0.25), 9 * np.ones(m), PAPER)
    wanted = [RIGHT(*call) for call in calls]
    assert all(map(np.array_equal, in_turns(RIGHT, calls, stride), wanted))
    assert not all(map(np.array_equal, in_turns(shared_scratch, calls, stride), wanted))


def test_a_lock_ends_the_turns() -> None:
    lock = Lock()

    def locked(D: Array, M: Array, p: Any) -> Array:
        with lock:
            return RIGHT(D, M, p)

    call = np.full(6, 0.5), np.ones(6), PAPER
    assert all(np.array_equal(found, RIGHT(*call)) for found in in_turns(locked, (call, call), 1))


def test_what_a_thread_raises_is_told() -> None:
    def fails() -> Array:
        raise ZeroDivisionError

    found = in_turns(fails, ((), ()), 1) + [one for _, one in side_by_side(fails, ((), ()), 0.01)]
    assert len(found) == 4
    assert all(isinstance(one, ZeroDivisionError) for one in found)


def test_a_right_stage_passes() -> None:
    judge(RIGHT)
    judge(lambda D, M, p: RIGHT(np.ascontiguousarray(D), np.ascontiguousarray(M), p))


def test_the_caller_has_results_of_its_own() -> None:
    """An argument that comes back as the result, as W of a static graph, is a copy: the next call changes it not."""
    stages = held_to_rules(replace(BACKEND, breath=SimpleNamespace(decay=lambda D, M, p: D))).require_breath()
    first = stages.decay(np.full(600, 0.5), np.ones(600), PAPER)
    stages.decay(np.full(600, 0.25), np.ones(600), PAPER)
    assert (first == 0.5).all()
