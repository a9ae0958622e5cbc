"""Where the judged code is called: nothing but a refusal comes out of it that could end a test otherwise than failed.

A test ends as skipped, or an example as one that was never drawn, by an exception: `unittest.SkipTest`, `pytest.skip`,
`hypothesis.assume`, `SystemExit`. Raised by the judged code they are failures.
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
from conformance.engine.values import printable
from spec.backend import FAMILIES, Backend
from spec.errors import SpecError

NOT_ITS_OWN = frozenset({
    *sys.stdlib_module_names, "conformance", "spec", "reference", "numpy", "torch", "transformers", "jaxtyping",
    "beartype", "numba", "_pytest", "pytest", "hypothesis",
})
"""Packages in which a mistake of the judged code shows, and is not made."""


class SubjectFailure(Exception):
    """What the judged code raised where it should have given a result: the type, the text, file and line."""


@contextmanager
def boundary(what: str, *admitted: type[Exception]) -> Iterator[None]:
    """Call the judged code inside.

    Args:
        what: is called, for the message.
        admitted: exceptions with a meaning, beside `SpecError` and those of engines.

    Raises:
        SubjectFailure: for any other exception, but for KeyboardInterrupt, which ends the run in this test.
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
    """The last line of the judged code, else the last of all."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = traceback.extract_tb(error.__traceback__)
    own = [line for (module, _), line in zip(frames, lines, strict=True)
           if str(module).partition(".")[0] not in NOT_ITS_OWN]
    last = (own or lines)[-1]
    return f"{last.filename}:{last.lineno}"


def guarded(backend: Backend) -> Backend:
    """The same backend, with each stage behind the boundary."""
    families: dict[str, Any] = {
        family: SimpleNamespace(**{name: partial(_ask, own, family, name) for name in stages(family)})
        for family in FAMILIES if (own := getattr(backend, family)) is not None
    }
    return replace(backend, name=printable(backend.name), **families)


def _ask(own: Any, family: str, name: str, *given: Any) -> Any:
    __tracebackhide__ = True
    with boundary(f"{family}.{name}"):
        return getattr(own, name)(*given)


@contextmanager
def unchecked() -> Iterator[None]:
    """Refusals are for users, who run without the shape checks of a test session."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextmanager
def refused(argument: str, given: object = ...) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """What runs inside MUST raise a SpecError that names this argument, what came for it (if known), and a bound."""
    with pytest.raises(SpecError) as caught:
        yield caught
    error = caught.value
    assert error.argument == argument
    assert given is ... or tells(error.value, given), f"{error.value!r} says nothing of {given!r}"
    assert isinstance(error.bound, str)
    assert error.bound.strip()


def tells(value: object, given: object) -> bool:
    """Whether a value stands for what came: that itself, its kind, shape, type or length, or an element of it."""
    known: list[Any] = [given, type(given), type(given).__name__]
    if isinstance(given, np.ndarray):
        known += [given.shape, list(given.shape), given.dtype, str(given.dtype), *given.ravel().tolist()]
    elif isinstance(given, list | tuple | set | frozenset):
        known += [list(given), *given]
    if isinstance(given, Sized):
        known.append(len(given))
    return any(_same(value, one) for one in known)


def _same(a: Any, b: Any) -> bool:
    """Equal, NaN with NaN; an array equals itself alone."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | list | tuple) != isinstance(b, np.ndarray | list | tuple):
        return False
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b or (a != a and b != b))
