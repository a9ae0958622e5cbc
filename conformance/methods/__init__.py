"""Brute forces of the kept sets of published policies, in plain Python.

`brutes` returns the policies of all modules.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.methods.brute import Brute

__all__ = ["brutes"]


@cache
def brutes() -> tuple["Brute", ...]:
    """Return BRUTES of each module, sorted by the names of the modules."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    return tuple(brute for module in modules for brute in getattr(module, "BRUTES", ()))
