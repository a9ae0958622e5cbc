"""The boundary between the suite and the stages that it judges: what holds of every call, whatever it computes.

spec/implementing.md, "Calls": a stage reads arrays of any layout and changes none, returns arrays that are the
caller's, depends on its arguments alone, may be called by two threads at once, and leaves the process as it was. No
test asks for this by name. Each call of any test gives the stage its arrays in another layout, in the memory of the
last call's; some calls are made twice, or while another thread calls the same stage. What a call is put through
follows from its arguments, so that a failure repeats. Below it, for tests that do ask: two threads inside one stage, in
turns, line by line, and as the interpreter lets them run.
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

from spec.backend import FAMILIES, Backend
from spec.decode import LiveTrunks
from spec.errors import SpecError
from spec.policy import Selection
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks

Array = np.ndarray[Any, Any]
Stage = Callable[..., Any]

RECORDS = (CoAttention, Trunks, TrunkGraph, Dissolution, LiveTrunks, Selection)
TWICE, TOGETHER, LOOKED = 16, 64, 16  # of as many calls one is made twice, with a thread inside, in a process looked at
TINY, TINY_CALLS = 2**10, 4  # bytes of arguments; of as many calls of fewer one is looked at: there are thousands
SMALL, LARGE, HUGE = 2**14, 2**20, 2**22  # bytes; calls of more are not interrupted, not made twice, left as they are
INTERRUPTIONS = 4
CHECKERS = frozenset({"jaxtyping", "beartype", "typing"})  # of types, whose lines would hide the stage's own
PATIENCE = 0.5  # seconds that an interrupted call waits for the other thread, which may wait for a lock


def held_to_rules(backend: Backend, together: bool = True) -> Backend:
    """The backend with its stages behind the boundary; `together` where two threads can be inside one of them."""
    families: dict[str, Any] = {
        name: _Family(name, stages, together) for name in FAMILIES if (stages := getattr(backend, name)) is not None
    }
    return replace(backend, **families)


class _Family:
    """The stages of a family, each behind the boundary.

    They are attributes of the object itself, because `isinstance` of a protocol asks no `__getattr__` from Python 3.12.
    """

    def __init__(self, family: str, stages: Any, together: bool) -> None:
        for name in dir(stages):
            if not name.startswith("_") and callable(stage := getattr(stages, name)):
                setattr(self, name, _Boundary(f"{family}.{name}", stage, together))


@dataclass(frozen=True)
class _Passed:
    """An array that a stage is given, and the caller's."""

    view: Array
    original: Array
    writeable: bool


class _Boundary:
    """One stage: the memory of its arguments, and the last call."""

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
            np.random.random()  # as seeding by a constant changes nothing the second time
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
        """A copy of the array where the last call had the same argument, in a layout that follows from its key.

        Where shape, type and layout are the last call's, it is that call's array itself, filled anew.
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
        """The result of a call: of a second one, or of one that another thread's calls interrupt."""
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
        """Check that the last result is what it was, and shares no memory with this one, which is held from now on."""
        __tracebackhide__ = True
        own = [x for x in arrays_of(result) if x.size and not any(np.may_share_memory(x, one.view) for one in passed)]
        for array, copy in self._held:
            assert array.tobytes() == copy.tobytes(), f"{self._name} changed the result of the call before"
            reused = any(np.may_share_memory(array, new) for new in own)
            assert not reused, f"{self._name} returned the memory of the result of the call before"
        assert all(x.flags.writeable for x in own), f"{self._name} returned a read-only array: it is the caller's"
        self._held = [(x, x.copy()) for x in own]

    def _check(self, passed: list[_Passed], before: Mapping[str, object]) -> None:
        __tracebackhide__ = True
        for one in passed:
            assert one.view.tobytes() == one.original.tobytes(), f"{self._name} wrote into an argument"
            assert one.view.flags.writeable == one.writeable, f"{self._name} changed flags.writeable of an argument"
        now = _process(len(before) > 2)
        changed = [what for what, state in before.items() if state != now[what]]
        assert not changed, f"{self._name} changed {' and '.join(changed)}"


def _view(memory: Array, like: Array, kind: int) -> Array:
    """An array of a shape and type in memory: rows or columns together, every second element, backwards, unaligned."""
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
    """A call inside of which another thread makes calls of its own, now and then at any of its lines."""
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
    """The result of a call whose every line of Python, with those that it calls and no checker's, is told."""
    def trace(frame: FrameType, *_: Any) -> Any:
        code = frame.f_code  # of a generated function it has no file
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
    """What a stage could change beside its result; what takes long to read if the whole is asked for."""
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
    """Whether types of the judged code are checked by samples, which are drawn from the same random state."""
    return "beartype" in sys.modules


def _members(record: Any) -> list[Any] | None:
    """The values of a record, or of a tuple; None of anything else."""
    if isinstance(record, tuple):
        return [*record]
    if type(record) in RECORDS:
        return [*vars(record).values()]
    return None


def arrays_of(value: Any) -> Iterator[Array]:
    """The arrays of numbers or bools in arguments or a result, in order."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        yield value
    for member in _members(value) or ():
        yield from arrays_of(member)


def _with_arrays(value: Any, made: Callable[[Array], Array]) -> Any:
    """The same with each such array replaced."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return made(value)
    members = _members(value)
    if members is None or not any(True for _ in arrays_of(value)):
        return value
    new = [_with_arrays(member, made) for member in members]
    return tuple(new) if type(value) is tuple else type(value)(*new)


def _key(array: Array) -> tuple[Any, ...]:
    """What an array's layout follows from; of the same numbers in another type the same."""
    ends = [float(array.flat[at]) for at in (0, -1)] if array.size else []
    # The hash of NaN is its address, by which another run would judge other calls.
    return (array.shape, *(end if end == end else -0.5 for end in ends))


Call = tuple[Any, ...]
TURN = 1.0  # seconds that a thread waits for its turn: the other one may wait for a lock that this one holds
TURNS = 20_000  # after so many a call runs on by itself
SWITCH = 1e-6  # seconds after which the interpreter asks a thread to let another one run


class _Turns:
    """Whose turn it is, of two threads; no thread's once one has ended or waits for a lock."""

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
