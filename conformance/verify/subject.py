"""Who is judged: an engine's name and version, and a digest of its files."""

import hashlib
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from spec.backend import BUILT_IN, ENTRY_POINTS, FAMILIES, resolve
from spec.errors import BackendUnavailable, SpecError

__all__ = ["Subject", "digest_of", "of_backend", "of_command"]


@dataclass(frozen=True)
class Subject:
    """An engine, as a certificate names it."""

    kind: str
    name: str
    version: str
    named: str
    files: str
    digest: str


def digest_of(files: Mapping[str, Path]) -> str:
    """SHA-256 of what `sha256sum` prints for files sorted by their names."""
    lines = [f"{hashlib.sha256(files[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _files_of_package(top: str) -> dict[str, Path]:
    """Every file of a top-level package, or the one of a module; what Python caches is left out."""
    found = find_spec(top)
    assert found is not None  # it was imported
    if not found.submodule_search_locations:
        return {Path(str(found.origin)).name: Path(str(found.origin))}
    return {
        f"{top}/{path.relative_to(home).as_posix()}": path
        for home in map(Path, found.submodule_search_locations) for path in home.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _version_of(top: str) -> str:
    for distribution in packages_distributions().get(top, []):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def of_backend(named: str) -> Subject:
    """A backend that can be loaded and has a family of stages.

    Raises:
        SpecError: for what names none.
        BackendUnavailable: for one that cannot be loaded, or has no family.
    """
    try:
        found = resolve(named)
    except (SpecError, BackendUnavailable):
        raise
    except (Exception, SystemExit) as error:  # its module may raise anything
        said = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(f"backend {named!r} cannot be loaded here: its module raises {said}") from error
    if all(getattr(found, family) is None for family in FAMILIES):
        raise BackendUnavailable(f"backend {found.name!r} has no stage family: there is nothing to judge")
    plugins = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    target = BUILT_IN.get(named) or (named if ":" in named else plugins[named])
    top = target.partition(":")[0].partition(".")[0]
    files = _files_of_package(top)
    return Subject("backend", found.name, _version_of(top), named, f"{len(files)} of {top}", digest_of(files))


def of_command(named: str) -> Subject:
    """An engine that a command starts; its files are the executable and every argument that is a file.

    Raises:
        SpecError: for a command whose executable is not there.
    """
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise SpecError("command", named, f"cannot be read: {error}") from error
    executable = shutil.which(words[0]) if words else None
    if executable is None:
        raise SpecError("command", named, "must begin with an executable file, and there is none of this name")
    files = {Path(word).name: Path(word) for word in words[1:] if Path(word).is_file()}
    files[Path(executable).name] = Path(executable)
    listed = " ".join(sorted(files))
    return Subject("command", Path(executable).name, "", named, listed, digest_of(files))
