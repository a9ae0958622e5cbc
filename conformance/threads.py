"""Two threads inside one stage: in turns, line by line, and as the interpreter lets them run."""

import sys
from collections.abc import Callable, Sequence
from threading import Barrier, Semaphore, Thread
from time import monotonic
from typing import Any

from conformance.calls import traced

Stage = Callable[..., Any]
Call = tuple[Any, ...]
PATIENCE = 1.0  # seconds that a thread waits for its turn: the other one may wait for a lock that this one holds
TURNS = 20_000  # after so many a call runs on by itself
SWITCH = 1e-6  # seconds after which the interpreter asks a thread to let another one run


class _Turns:
    """Whose turn it is, of two threads; no thread's once one has ended or waits for a lock."""

    def __init__(self) -> None:
        self._mine, self._left = (Semaphore(1), Semaphore(0)), TURNS

    def begin(self, at: int) -> None:
        self._mine[at].acquire(timeout=PATIENCE)

    def pass_on(self, at: int) -> None:
        if self._left > 0:
            self._left -= 1
            self._mine[1 - at].release()
            if not self._mine[at].acquire(timeout=PATIENCE):
                self._left = 0

    def end(self, at: int) -> None:
        self._left = 0
        self._mine[1 - at].release()


def in_turns(stage: Stage, calls: tuple[Call, Call], stride: int) -> list[Any]:
    """The results, or what was raised, of two calls in two threads that change places at every stride-th line."""
    turns, found = _Turns(), list[Any]([None, None])

    def ask(at: int) -> None:
        lines = iter(range(1, sys.maxsize))

        def at_line() -> None:
            if next(lines) % stride == 0:
                turns.pass_on(at)

        turns.begin(at)
        try:
            found[at] = traced(stage, calls[at], at_line)
        except BaseException as error:
            found[at] = error
        finally:
            turns.end(at)

    _run([Thread(target=ask, args=(at,), daemon=True) for at in range(2)])
    return found


def side_by_side(stage: Stage, calls: Sequence[Call], seconds: float) -> list[tuple[int, Any]]:
    """Index and result, or what was raised, of calls that a thread for each makes once, and for so many seconds."""
    start, until, found = Barrier(len(calls)), monotonic() + seconds, list[tuple[int, Any]]()

    def ask(at: int) -> None:
        start.wait()
        again = True
        try:
            while again:
                found.append((at, stage(*calls[at])))
                again = monotonic() < until
        except BaseException as error:
            found.append((at, error))

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        _run([Thread(target=ask, args=(at,), daemon=True) for at in range(len(calls))])
    finally:
        sys.setswitchinterval(before)
    return found


def _run(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
