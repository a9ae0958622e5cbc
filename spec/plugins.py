"""Plugins: objects from a user's module, given as `module:ATTRIBUTE` or as the name of an entry point."""

import hashlib
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from spec.errors import SpecError
from spec.validate import bound_of_names

__all__ = ["Plugin", "find_plugin", "load", "load_own", "target_of"]


@dataclass(frozen=True)
class Plugin:
    """An object that was loaded by name.

    Attributes:
        value: the object.
        digest: first 8 hex digits of the hash of the module's file at load time, or "" if the module has no file.
    """

    value: object
    digest: str


def target_of(argument: str, name: str, group: str, built_in: Collection[str] = ()) -> str:
    """Return the target `module:ATTRIBUTE` of a named entry point. A name that is a target is returned unchanged.

    Args:
        argument: name of the argument that the error message shows.
        name: the user's value.
        group: group of entry points.
        built_in: built-in names that the error message shows as valid names.

    Raises:
        SpecError: if the name is unknown. The message lists similar names.
    """
    if ":" in name:
        return name
    brought = {point.name: point.value for point in entry_points(group=group)}
    if name not in brought:
        known = bound_of_names(name, [*built_in, *brought])
        raise SpecError(argument, name, f"{known} (your own: 'module:ATTRIBUTE')")
    return brought[name]


def load(target: str) -> Plugin:
    """Load the object `module:ATTRIBUTE`.

    Raises:
        ImportError: if loading fails. Any exception that the module raises becomes an ImportError.
    """
    name, _, attribute = target.partition(":")
    try:
        module = import_module(name)
        return Plugin(getattr(module, attribute), _digest(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(str(error)) from error
    except Exception as error:  # of a module that is not ours
        raise ImportError(f"{type(error).__name__}: {error}") from error


def load_own(target: str) -> Plugin:
    """Load `module:ATTRIBUTE` from a user's module. The search includes the current folder, as with `python -m`.

    Raises:
        ImportError: as in `load`.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return load(target)
    finally:
        sys.path.remove(here)


def find_plugin(argument: str, name: str, group: str, built_in: Collection[str] = ()) -> Plugin:
    """Load the object with the name that the user gave. The arguments are the same as for `target_of`.

    Raises:
        SpecError: if the name is unknown, or if loading fails.
    """
    target = target_of(argument, name, group, built_in)
    try:
        return load_own(target)
    except ImportError as error:
        raise SpecError(argument, name, f"cannot be loaded: {error}") from error


@cache
def _digest(module: ModuleType) -> str:
    """Return the hash of the module's file, computed once, because the file may change after the module is loaded."""
    file = getattr(module, "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]
