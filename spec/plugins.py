"""What users bring: an object of a module of theirs, as `module:ATTRIBUTE` or by the name of an entry point."""

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
        digest: of the file of its module, as it was when it was loaded: 8 hexadecimal digits, or none without a file.
    """

    value: object
    digest: str


def target_of(argument: str, name: str, group: str, built_in: Collection[str] = ()) -> str:
    """The `module:ATTRIBUTE` that a name stands for: itself, or an entry point's.

    Args:
        argument: what is named, for the refusal.
        name: as users give it.
        group: of entry points.
        built_in: the names beside them.

    Raises:
        SpecError: for an unknown name; those that look like it are named.
    """
    if ":" in name:
        return name
    brought = {point.name: point.value for point in entry_points(group=group)}
    if name not in brought:
        known = bound_of_names(name, [*built_in, *brought])
        raise SpecError(argument, name, f"{known} (your own: 'module:ATTRIBUTE')")
    return brought[name]


def load(target: str) -> Plugin:
    """The object of `module:ATTRIBUTE`.

    Raises:
        ImportError: when it cannot be loaded, whatever the module raises.
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
    """The same of a user's module, which may lie in the current folder, where `python -m` finds modules.

    Raises:
        ImportError: as `load`.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return load(target)
    finally:
        sys.path.remove(here)


def find_plugin(argument: str, name: str, group: str, built_in: Collection[str] = ()) -> Plugin:
    """What a user's name stands for; arguments as `target_of`'s.

    Raises:
        SpecError: for an unknown name, or what cannot be loaded.
    """
    target = target_of(argument, name, group, built_in)
    try:
        return load_own(target)
    except ImportError as error:
        raise SpecError(argument, name, f"cannot be loaded: {error}") from error


@cache
def _digest(module: ModuleType) -> str:
    """Made once for each module: its file may change afterwards, and the loaded code does not."""
    file = getattr(module, "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]
