"""Boundary around the code under test, so that an exception of that code can only fail a test.

`unittest.SkipTest`, `pytest.skip` and `SystemExit` would end a test as skipped. `hypothesis.assume` would discard an
example. If the code under test raises such an exception, the boundary turns it into a failure.
"""

import sys
import traceback
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jaxtyping
import numpy as np
import pytest

from conformance.engine.ops import stages
from conformance.engine.process import EngineFailure
from conformance.engine.values import LONGEST_NAME
from spec.backend import FAMILIES, Backend
from spec.errors import SpecError
from spec.printing import printable

TRUSTED = frozenset({
    *sys.stdlib_module_names, "conformance", "spec", "reference", "numpy", "torch", "transformers", "jaxtyping",
    "beartype", "numba", "_pytest", "pytest", "hypothesis",
})
"""Packages that are not the code under test. An error of the code under test may surface in these packages."""


class SubjectFailure(Exception):
    """Exception of the code under test, raised in place of a result: with type, text, file and line."""


@contextmanager
def boundary(what: str, *admitted: type[Exception]) -> Iterator[None]:
    """Call the code under test inside this context manager.

    Args:
        what: name of the called function, for the message.
        admitted: exceptions that are allowed in addition to `SpecError` and the exceptions of engines.

    Raises:
        SubjectFailure: for any other exception, except KeyboardInterrupt, which ends the run in this test.
    """
    __tracebackhide__ = True
    passing: tuple[type[BaseException], ...] = (SpecError, EngineFailure, KeyboardInterrupt, *admitted)
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        raise SubjectFailure(f"{what} raised {type(error).__name__} at {_where(error)}\n{error}") from error


def _where(error: BaseException) -> str:
    """Return the last line of the code under test in a traceback, otherwise the last line of the traceback."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = traceback.extract_tb(error.__traceback__)
    of_subject = [line for (module, _), line in zip(frames, lines, strict=True)
           if str(module).partition(".")[0] not in TRUSTED]
    last = (of_subject or lines)[-1]
    return f"{last.filename}:{last.lineno}"


def guarded(backend: Backend) -> Backend:
    """Return the backend with each stage inside `boundary`."""
    families: dict[str, Any] = {
        family: SimpleNamespace(**{name: partial(_ask, stage_family, family, name) for name in stages(family)})
        for family in FAMILIES if (stage_family := getattr(backend, family)) is not None
    }
    return replace(backend, name=printable(backend.name, LONGEST_NAME), **families)


def _ask(stage_family: Any, family: str, name: str, *given: Any) -> Any:
    __tracebackhide__ = True
    with boundary(f"{family}.{name}"):
        return getattr(stage_family, name)(*given)


@contextmanager
def unchecked() -> Iterator[None]:
    """Turn off the shape checks of a test session, because users get errors without these checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextmanager
def refused(argument: str, given: object = ...) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Check that the block raises a SpecError that names this argument, the given value (if known) and a bound."""
    with pytest.raises(SpecError) as caught:
        yield caught
    error = caught.value
    assert error.argument == argument
    assert given is ... or describes_value(error.value, given), f"{error.value!r} says nothing of {given!r}"
    assert isinstance(error.bound, str)
    assert error.bound.strip()


def describes_value(value: object, given: object) -> bool:
    """Return True if the value in an error message describes the given value.

    The value may be the given value, its type, shape, dtype or length, or one of its elements.
    """
    known: list[Any] = [given, type(given), type(given).__name__]
    if isinstance(given, np.ndarray):
        known += [given.shape, list(given.shape), given.dtype, str(given.dtype), *given.ravel().tolist()]
    elif isinstance(given, list | tuple | set | frozenset):
        known += [list(given), *given]
    if isinstance(given, Sized):
        known.append(len(given))
    return any(_same(value, one) for one in known)


def _same(a: Any, b: Any) -> bool:
    """Return True if two values are equal. NaN equals NaN, and an array equals only an array."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | list | tuple) != isinstance(b, np.ndarray | list | tuple):
        return False
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b or (a != a and b != b))
