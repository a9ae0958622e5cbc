"""Checks of every call of a tested stage: the rules that do not depend on the computed result.

The rules are in spec/implementing.md, "Calls". A stage reads arrays of any layout and changes no argument. A stage
returns new arrays that belong to the caller. The result depends only on the arguments of the call. Two threads may call
a stage at once. A stage does not change the process.

No test checks these rules by name. In each call of any test, the stage receives its arrays in a different layout, in
the memory of the previous call. Some calls are made twice, or while another thread calls the same stage. The choice
depends on the arguments of the call, so a failure can be repeated.

The last part of the module is for tests of concurrency. Two threads run inside one stage, in turns, line by line, or as
the interpreter schedules them.
"""

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Barrier, Semaphore, Thread
from time import monotonic
from types import FrameType
from typing import Any

import numpy as np

from conformance.engine.values import CLASSES
from spec.backend import FAMILIES, Backend
from spec.errors import SpecError

Array = np.ndarray[Any, Any]
Stage = Callable[..., Any]

# One call of TWICE is made twice, and one of TOGETHER with another thread inside. One call of LOOKED compares the state
# of the process before and after the call.
TWICE, TOGETHER, LOOKED = 16, 64, 16
# One of TINY_CALLS calls with fewer than TINY bytes of arguments is checked completely, because there are thousands.
TINY, TINY_CALLS = 2**10, 4
# Bytes: larger calls are not interrupted (SMALL), not made twice (LARGE), and receive the caller's arrays (HUGE).
SMALL, LARGE, HUGE = 2**14, 2**20, 2**22
INTERRUPTIONS = 4
# Checkers of types. Their lines would hide the lines of the stage.
CHECKERS = frozenset({"jaxtyping", "beartype", "typing"})
PATIENCE = 0.5  # Seconds that an interrupted call waits for the other thread, which may wait for a lock.


def held_to_rules(backend: Backend, together: bool = True) -> Backend:
    """Return the backend with checks around each stage.

    `together`: two threads can be inside a stage at the same time.
    """
    families: dict[str, Any] = {
        name: _Family(name, stages, together) for name in FAMILIES if (stages := getattr(backend, name)) is not None
    }
    return replace(backend, **families)


class _Family:
    """Stages of a family, each with the checks.

    The stages are attributes of the object itself: from Python 3.12 on, `isinstance` of a protocol does not use
    `__getattr__`.
    """

    def __init__(self, family: str, stages: Any, together: bool) -> None:
        for name in dir(stages):
            if not name.startswith("_") and callable(stage := getattr(stages, name)):
                setattr(self, name, _Boundary(f"{family}.{name}", stage, together))


@dataclass(frozen=True)
class _Passed:
    """An array that a stage receives, and the original array of the caller."""

    view: Array
    original: Array
    writeable: bool


class _Boundary:
    """Checks around one stage, with the memory of its arguments and the previous call."""

    def __init__(self, name: str, run: Stage, together: bool) -> None:
        self._name, self._run, self._together = name, run, together
        self._memory: dict[int, Array] = {}
        self._views: dict[int, tuple[Any, Array]] = {}
        self._held: list[tuple[Array, Array]] = []
        self._last: tuple[Any, ...] | None = None

    def __call__(self, *given: Any) -> Any:
        __tracebackhide__ = True
        digest, skip = divmod(hash(tuple(map(_key, arrays_of(given)))), TINY_CALLS)
        size = sum(array.nbytes for array in arrays_of(given))
        first = self._last is None
        if size > HUGE or (skip and size < TINY and not first):
            before = _process(False)
            try:
                return self._run(*given)
            finally:
                self._check([], before)
        passed = list[_Passed]()
        arguments = _with_arrays(given, partial(self._placed, passed, digest % 2 == 0))
        whole = first or digest % LOOKED == 0
        if whole:
            np.random.random()  # A second seeding by the same constant would change nothing.
        before = _process(whole)
        try:
            result = self._called(arguments, passed, digest)
        except SpecError as error:
            for one in passed:
                error.value = one.original if error.value is one.view else error.value
            self._check(passed, before)
            raise
        self._check(passed, before)
        self._last = given
        return _with_arrays(result, np.copy)

    def _placed(self, passed: list[_Passed], writeable: bool, array: Array) -> Array:
        """Return a copy of the array, in the memory that the same argument had in the previous call.

        The layout depends on the key of the array. If shape, dtype and layout equal those of the previous call, the
        copy is the array object of the previous call with new content.
        """
        place = len(passed)
        layout = (hash(_key(array)) + place) % 7
        memory, needed = self._memory.get(place), 2 * array.nbytes + array.itemsize
        if memory is None or len(memory) < needed:
            memory = self._memory[place] = np.zeros(2 * needed, dtype=np.uint8)
        like = len(memory), layout, array.shape, array.dtype
        last, view = self._views.get(place, (None, array))
        if last != like:
            view = _view(memory, array, layout)
            self._views[place] = like, view
        view.flags.writeable = True
        view[...] = array
        view.flags.writeable = writeable
        passed.append(_Passed(view, array, view.flags.writeable))
        return view

    def _called(self, arguments: tuple[Any, ...], passed: list[_Passed], digest: int) -> Any:
        """Return the result of a call: of a second identical call, or of a call that another thread interrupts."""
        __tracebackhide__ = True
        run, size = self._run, sum(one.original.nbytes for one in passed)
        if digest % TWICE == 0 and size <= LARGE:
            self._hold(run(*arguments), passed)
            for result, copy in self._held:
                result.fill(0)
                copy.fill(0)
        elif self._together and self._last is not None and digest % TOGETHER == 1 and size <= SMALL:
            run = partial(_interrupted, run, self._last, digest)
        result = run(*arguments)
        self._hold(result, passed)
        return result

    def _hold(self, result: Any, passed: list[_Passed]) -> None:
        """Check that the previous result is unchanged and shares no memory with the new result.

        Then hold the new result.
        """
        __tracebackhide__ = True
        given = [x for x in arrays_of(result) if x.size and not any(np.may_share_memory(x, one.view) for one in passed)]
        for array, copy in self._held:
            assert array.tobytes() == copy.tobytes(), f"{self._name} changed the result of the call before"
            reused = any(np.may_share_memory(array, new) for new in given)
            assert not reused, f"{self._name} returned the memory of the result of the call before"
        assert all(x.flags.writeable for x in given), f"{self._name} returned a read-only array: it is the caller's"
        self._held = [(x, x.copy()) for x in given]

    def _check(self, passed: list[_Passed], before: Mapping[str, object]) -> None:
        __tracebackhide__ = True
        for one in passed:
            assert one.view.tobytes() == one.original.tobytes(), f"{self._name} wrote into an argument"
            assert one.view.flags.writeable == one.writeable, f"{self._name} changed flags.writeable of an argument"
        now = _process(len(before) > 2)
        changed = [what for what, state in before.items() if state != now[what]]
        assert not changed, f"{self._name} changed {' and '.join(changed)}"


def _view(memory: Array, like: Array, kind: int) -> Array:
    """Return an array of a shape and dtype in the memory, in one of seven layouts.

    The layouts are contiguous, Fortran order, first two axes swapped, strides of two elements or two rows, backwards,
    and unaligned.
    """
    axes = [*range(like.ndim)]
    if kind == 1:
        axes.reverse()
    elif kind == 2:
        axes[:2] = axes[1::-1]
    stride, strides = like.itemsize * (2 if kind == 3 else 1), [0] * like.ndim
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= max(1, like.shape[axis])
    if kind == 4 and axes:
        strides[0] *= 2
    offset = like.itemsize // 2 if kind == 6 else 0
    if kind == 5 and like.size:
        offset = sum((n - 1) * step for n, step in zip(like.shape, strides, strict=True))
        strides = [-step for step in strides]
    return np.ndarray(like.shape, like.dtype, memory.data, offset, strides)


def _interrupted(run: Stage, other: tuple[Any, ...], seed: int, /, *arguments: Any) -> Any:
    """Run a call. At a few random lines of this call, start further calls in a different thread."""
    lines = list[int]()
    traced(run, arguments, lambda: lines.append(1))
    chosen = random.Random(seed).sample(range(len(lines)), min(INTERRUPTIONS, len(lines)))
    threads, at, failed = list[Thread](), iter(range(2 * len(lines) + 2)), list[BaseException]()

    def ask() -> None:
        try:
            run(*other)
        except BaseException as error:
            failed.append(error)

    def interrupt() -> None:
        line = next(at, -1)
        if line in chosen and not any(thread.is_alive() for thread in threads):
            threads.append(Thread(target=ask, daemon=True))
            threads[-1].start()
            threads[-1].join(PATIENCE if chosen.index(line) % 3 else 0.0)

    try:
        return traced(run, arguments, interrupt)
    finally:
        for thread in threads:
            thread.join()
        assert not failed, f"a second thread inside the stage failed: {failed[0]!r}"


def traced(run: Stage, arguments: tuple[Any, ...], at_line: Callable[[], None]) -> Any:
    """Return the result of a call, and call `at_line` at every line of Python, except lines of type checkers."""
    def trace(frame: FrameType, *_: Any) -> Any:
        code = frame.f_code  # A generated function has no file.
        if code.co_filename.startswith("<") or frame.f_globals.get("__name__", "").partition(".")[0] in CHECKERS:
            return None
        at_line()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run(*arguments)
    finally:
        sys.settrace(before)


def _process(whole: bool) -> Mapping[str, object]:
    """Return the state of the process that a stage could change. `whole` includes state that is slow to read."""
    state: dict[str, object] = {"NumPy's error state": np.geterr(), "the filters of warnings": [*warnings.filters]}
    if whole:
        kind, words, *rest = np.random.get_state(legacy=True)
        state |= {
            "NumPy's random state": (kind, np.asarray(words).tobytes(), *rest),
            "the random state": None if checkers_draw() else random.getstate(),
            "the environment": dict(os.environ), "the working directory": os.getcwd(),
        }
    return state


def checkers_draw() -> bool:
    """Return True if beartype checks samples of types. Its samples use the global random state."""
    return "beartype" in sys.modules


def _members(record: Any) -> list[Any] | None:
    """Return the values of a record or tuple, or None for any other object."""
    if isinstance(record, tuple):
        return [*record]
    if type(record) in CLASSES.values():
        return [*vars(record).values()]
    return None


def arrays_of(value: Any) -> Iterator[Array]:
    """Yield the arrays of numbers or bools in arguments or in a result, in order."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        yield value
    for member in _members(value) or ():
        yield from arrays_of(member)


def _with_arrays(value: Any, convert: Callable[[Array], Array]) -> Any:
    """Return the value with each array of numbers or bools replaced."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return convert(value)
    members = _members(value)
    if members is None or not any(True for _ in arrays_of(value)):
        return value
    new = [_with_arrays(member, convert) for member in members]
    return tuple(new) if type(value) is tuple else type(value)(*new)


def _key(array: Array) -> tuple[Any, ...]:
    """Return the key that decides an array's layout. Equal numbers in a different dtype have the same key."""
    ends = [float(array.flat[at]) for at in (0, -1)] if array.size else []
    # The hash of NaN is its address, so another run would check other calls.
    return (array.shape, *(end if end == end else -0.5 for end in ends))


Call = tuple[Any, ...]
TURN = 1.0  # Seconds that a thread waits for its turn: the other thread may wait for a lock of this thread.
TURNS = 20_000  # Number of turns, after which a call runs without interruption.
SWITCH = 1e-6  # Seconds after which the interpreter switches threads.


class _Turns:
    """Turns of two threads. After one thread has ended or waits for a lock, both run freely."""

    def __init__(self) -> None:
        self._mine, self._left = (Semaphore(1), Semaphore(0)), TURNS

    def begin(self, at: int) -> None:
        self._mine[at].acquire(timeout=TURN)

    def pass_on(self, at: int) -> None:
        if self._left > 0:
            self._left -= 1
            self._mine[1 - at].release()
            if not self._mine[at].acquire(timeout=TURN):
                self._left = 0

    def end(self, at: int) -> None:
        self._left = 0
        self._mine[1 - at].release()


def in_turns(stage: Stage, calls: tuple[Call, Call], stride: int) -> list[Any]:
    """Return the results or exceptions of two calls in two threads that take turns at every stride-th line."""
    turns, result = _Turns(), list[Any]([None, None])

    def ask(at: int) -> None:
        lines = iter(range(1, sys.maxsize))

        def at_line() -> None:
            if next(lines) % stride == 0:
                turns.pass_on(at)

        turns.begin(at)
        try:
            result[at] = traced(stage, calls[at], at_line)
        except BaseException as error:
            result[at] = error
        finally:
            turns.end(at)

    _run([Thread(target=ask, args=(at,), daemon=True) for at in range(2)])
    return result


def side_by_side(stage: Stage, calls: Sequence[Call], seconds: float) -> list[tuple[int, Any]]:
    """Return index and result, or exception, of calls that run in one thread each, at least once and for `seconds`."""
    start, until, result = Barrier(len(calls)), monotonic() + seconds, list[tuple[int, Any]]()

    def ask(at: int) -> None:
        start.wait()
        again = True
        try:
            while again:
                result.append((at, stage(*calls[at])))
                again = monotonic() < until
        except BaseException as error:
            result.append((at, error))

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        _run([Thread(target=ask, args=(at,), daemon=True) for at in range(len(calls))])
    finally:
        sys.setswitchinterval(before)
    return result


def _run(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
