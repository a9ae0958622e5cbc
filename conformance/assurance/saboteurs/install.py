"""A saboteur at work: in this process for good, or in a private copy of the reference.

One replacement serves both. In a process of its own every test sees the wrong function, those that call the
reference item by item too. The private copy is for a process that needs the real reference beside it; its
`Backend` is judged as anybody's.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

from conformance.assurance.saboteurs.registry import Saboteur
from spec.backend import Backend

__all__ = ["PrivateReference", "install", "private_reference", "standing_in"]

PATCHED = ("spec", "reference", "conformance", "models_integration")
# What a copy must hold: the stages, the pipeline and what stands beside them.
COPIED = ("reference.backend", "reference.crystalcache.compaction", "reference.memory")


@dataclass(frozen=True)
class PrivateReference:
    """A copy of the reference with a saboteur in it."""

    backend: Backend
    prefill: Callable[..., Any]
    modules: dict[str, ModuleType]


def install(saboteur: Saboteur) -> None:
    """Put the saboteur into the modules of this process; those imported later find it there."""
    import_module(saboteur.original.__module__)
    rebind(saboteur.original, saboteur.wrong, _modules_of(PATCHED).values())


@contextmanager
def standing_in(saboteur: Saboteur) -> Iterator[None]:
    """The saboteur in the modules of this process, for a while."""
    install(saboteur)
    try:
        yield
    finally:
        rebind(saboteur.wrong, saboteur.original, _modules_of(PATCHED).values())


@cache
def private_reference(saboteur: Saboteur) -> PrivateReference:
    """A copy with the saboteur in it; the real modules stay as they are."""
    real = {name: sys.modules.pop(name) for name in _modules_of(("reference",))}
    try:
        for name in COPIED:
            import_module(name)
        copies = _modules_of(("reference",))
    finally:
        for name in _modules_of(("reference",)):
            del sys.modules[name]
        sys.modules.update(real)
    origin = copies.get(saboteur.original.__module__)
    copied = attrgetter(saboteur.original.__qualname__)(origin) if origin else saboteur.original
    rebind(copied, saboteur.wrong, copies.values())
    real_copy = vars(copies["reference.backend"])["BACKEND"]
    prefill = vars(copies["reference.crystalcache.pipeline"])["prefill"]
    return PrivateReference(replace(real_copy, name=saboteur.name), prefill, copies)


def rebind(original: object, wrong: object, modules: Iterable[ModuleType]) -> None:
    """Let every name, table of functions and method in the modules that means `original` mean `wrong`."""
    for module in modules:
        tables = [value for value in vars(module).values() if isinstance(value, dict)]
        for table in (vars(module), *tables):
            for name, value in list(table.items()):
                if value is original:
                    table[name] = wrong
        for owner in [value for value in vars(module).values() if isinstance(value, type)]:
            if owner.__module__ == module.__name__:
                _rebind_methods(owner, original, wrong)


def _rebind_methods(owner: type, original: object, wrong: object) -> None:
    for name, value in list(vars(owner).items()):
        if value is original:
            setattr(owner, name, wrong)


def _modules_of(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    return {
        name: module for name, module in sys.modules.items()
        if name.partition(".")[0] in packages and not name.startswith("conformance.assurance.saboteurs")
    }
