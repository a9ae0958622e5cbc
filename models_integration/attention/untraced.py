"""What torch.compile must run as it is: it works by module, by cache and by forward, which a trace would freeze."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which torch.compile neither traces nor looks into: its graphs end here and begin behind.

    The compiler takes seconds to load, so that nothing is asked of it before somebody else has loaded it.
    """

    skipped: list[Callable[P, R]] = []  # made once: that takes longer than many a call

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not skipped:
            skipped.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]  # by torch
        return skipped[0](*args, **kwargs)

    return run
