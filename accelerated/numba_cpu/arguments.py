"""Conversion of the arguments of compiled functions to contiguous, read-only arrays.

With converted arguments, Numba compiles each function only once. Otherwise Numba compiles a function for each
combination of memory layouts and writable flags.
"""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np

__all__ = ["contiguous_arguments"]

Stages = TypeVar("Stages")


def contiguous_arguments(stages: type[Stages]) -> type[Stages]:
    """Class decorator: methods receive aligned, read-only arrays. Arrays with one or two axes are also contiguous."""
    for name, method in list(vars(stages).items()):
        if isinstance(method, staticmethod):
            setattr(stages, name, staticmethod(_wrapped(method.__func__)))
        elif not name.startswith("_"):
            setattr(stages, name, _wrapped(method))
    return stages


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any) -> Any:
        return method(*map(_plain, arguments))

    return call


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        plain = np.require(value, requirements=["C", "A"] if value.ndim <= 2 else ["A"])
        if plain.flags.writeable:
            plain = plain.view()
            plain.flags.writeable = False
        return plain
    if isinstance(value, tuple) and any(isinstance(member, np.ndarray) for member in value):
        return type(value)(*map(_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {name: _plain(member) for name, member in vars(value).items() if isinstance(member, np.ndarray)}
        same = all(created is getattr(value, name) for name, created in changed.items())
        return value if same else replace(value, **changed)
    return value
