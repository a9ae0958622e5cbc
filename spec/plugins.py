"""Plugins: objects that kvspec loads from a user's module, given `module:ATTRIBUTE` or the name of an entry point."""

import hashlib
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from types import ModuleType

from spec.errors import SpecError
from spec.validate import LISTED_MOST, bound_of_names, did_you_mean

__all__ = ["Plugin", "current_folder_last", "find_plugin", "load", "load_from_folder", "search_path", "target_of"]


_COMMANDS = {"kvspec.policies": "kvspec policies", "kvspec.tasks": "kvspec tasks"}
"""Commands that list the names of a group of entry points."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin.

    Attributes:
        value: the object that was loaded.
        digest: first 8 hex digits of the SHA-256 hash of the module's file at load time. "" if the module has no file.
    """

    value: object
    digest: str


def target_of(argument: str, name: str, group: str, built_in: Collection[str] = ()) -> str:
    """Return the target `module:ATTRIBUTE` of the entry point with this name.

    If the name is already a target (contains ":"), the name is returned unchanged.

    Args:
        argument: name of the argument, for the error message.
        name: name of an entry point, or a target.
        group: group of entry points in which to search.
        built_in: built-in names that the error message lists as valid, in addition to the entry points.

    Raises:
        SpecError: if there is no entry point with this name. The message lists valid or similar names.
    """
    if ":" in name:
        return name
    brought = {point.name: point.value for point in entry_points(group=group)}
    if name not in brought:
        if not (known := [*built_in, *brought]):
            raise SpecError(argument, name, "must be 'module:ATTRIBUTE', because no installed package has such a name")
        bound = bound_of_names(name, known, _COMMANDS.get(group, ""))
        raise SpecError(argument, name, f"{bound} (your own: 'module:ATTRIBUTE')")
    return brought[name]


def load(target: str) -> Plugin:
    """Load the object `module:ATTRIBUTE`.

    Raises:
        ImportError: if the object cannot be loaded, or if the target names a file instead of a module. Also if the
            module raises any exception during the import. The message has the file and the line of the exception.
    """
    name, _, attribute = target.partition(":")
    if name.endswith(".py") or "/" in name:
        stem = PurePath(name).name.removesuffix(".py")
        raise ImportError(f"{name} is a file: write the name of the module, {stem}:{attribute}, in the file's folder")
    if not name.strip(".") or not attribute:
        raise ImportError("write the name of the module and of the object, such as my_module:MY_OBJECT")
    try:
        module = import_module(name)
    except Exception as error:  # the import can raise anything
        raise ImportError(_reason(name, error)) from error
    try:
        return Plugin(getattr(module, attribute), _digest(module))
    except AttributeError as error:
        raise ImportError(f"{error}{_hint(module, attribute)}") from error
    except Exception as error:  # a module can compute its attributes
        raise ImportError(f"{type(error).__name__}: {error}") from error


def _reason(name: str, error: Exception) -> str:
    """Return why the module `name` cannot be imported: no such module, or the error and its place in the module."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{name}.".startswith(f"{missing}."):
        return f"{error}; install the module, or start kvspec in the folder that contains {name.partition('.')[0]}"
    message = f"the module raises {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is in this file
    in_module = [frame for frame in frames if "importlib" not in frame.filename]
    return message if isinstance(error, SyntaxError) or not in_module else (
        f"{message} ({PurePath(in_module[-1].filename).name}, line {in_module[-1].lineno})"
    )


def _hint(module: ModuleType, attribute: str) -> str:
    """Return the end of an error text with the public names of a module, or with similar names if there are many."""
    public = [name for name in vars(module) if not name.startswith("_")]
    if len(public) > LISTED_MOST:
        return did_you_mean(attribute, public)
    return f"; it has {', '.join(public)}" if public else "; it is empty"


def load_from_folder(target: str) -> Plugin:
    """Load the object `module:ATTRIBUTE` from a user's module, which may be in the current folder.

    A file of the current folder hides no module, also not from the imports of the user's module.

    Raises:
        ImportError: under the same conditions as in `load`. If a file of the folder has the name of a different module,
            the message names the file.
    """
    with current_folder_last():
        try:
            return load(target)
        except ImportError as error:
            top = target.partition(":")[0].partition(".")[0]
            here = PathFinder.find_spec(top, [str(Path.cwd())]) if top else None
            used = getattr(sys.modules.get(top), "__spec__", None)
            if here is None or used is None or here.origin == used.origin:
                raise
            reason = f"{error}; {here.origin} has the name of a different module ({used.origin}): rename the file"
            raise ImportError(reason) from error


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Context manager in which code of the user can import more modules of the current folder.

    The folder is last in `sys.path`, so that no file in the folder hides a different module.
    """
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)


def search_path() -> str:
    """Return `sys.path` as a value of PYTHONPATH.

    A child process with this value and the option -P finds the modules that this process finds. Without -P, a file in
    the current folder, such as secrets.py, would hide a module of Python.
    """
    return os.pathsep.join(filter(None, sys.path))


def find_plugin(argument: str, name: str, group: str, built_in: Collection[str] = ()) -> Plugin:
    """Load the object with the given name. The arguments have the same meaning as in `target_of`.

    Raises:
        SpecError: if there is no entry point with this name, or if the object cannot be loaded.
    """
    target = target_of(argument, name, group, built_in)
    try:
        return load_from_folder(target)
    except ImportError as error:
        raise SpecError(argument, name, f"cannot be loaded: {error}") from error


@cache
def _digest(module: ModuleType) -> str:
    """Return the hash of the module's file at the first call. The file may change after the module is loaded."""
    file = getattr(module, "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]
