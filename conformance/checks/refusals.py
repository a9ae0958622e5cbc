"""What is said of a refusal: it names the argument, what came and the bound. The words are free."""

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import jaxtyping
import numpy as np
import pytest

from spec.errors import SpecError

__all__ = ["refused", "tells", "unchecked"]


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
