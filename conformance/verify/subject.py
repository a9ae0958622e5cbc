"""Who is judged: a subject's name and version, and a digest of its files."""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformance.checks.promises import PROPERTIES, promised
from conformance.strategies.policy_inputs import drawn
from conformance.strategies.policy_inputs import named as policy_of
from conformance.witness.client import Server
from reference.policies.names import ENTRY_POINTS as POLICIES
from reference.policies.names import NAMES
from spec.backend import BUILT_IN, ENTRY_POINTS, FAMILIES, resolve
from spec.errors import BackendUnavailable, SpecError
from spec.plugins import find_plugin, target_of

CACHES = "kvspec.caches"
OURS = "reference.policies:names"


@dataclass(frozen=True)
class Subject:
    """What is judged, as a certificate names it."""

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
    found = _loaded("backend", named, lambda: resolve(named))
    if all(getattr(found, family) is None for family in FAMILIES):
        raise BackendUnavailable(f"backend {found.name!r} has no stage family, so kvspec cannot test the backend")
    return _of_package("backend", found.name, named, BUILT_IN.get(named) or target_of("backend", named, ENTRY_POINTS))


def _loaded(kind: str, named: str, find: Callable[[], Any]) -> Any:
    try:
        return find()
    except (SpecError, BackendUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:  # its module may raise anything
        said = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(f"{kind} {named!r} cannot be loaded, because the module raises {said}") from error


def _of_package(kind: str, name: str, named: str, target: str) -> Subject:
    top = target.partition(":")[0].partition(".")[0]
    files = _files_of_package(top)
    return Subject(kind, name, _version_of(top), named, f"{len(files)} of {top}", digest_of(files))


def of_policy(named: str, method: str = "") -> Subject:
    """A policy that promises something, or that must be a method.

    Raises:
        SpecError: for what names none, cannot be loaded, or promises nothing.
        BackendUnavailable: for a module that ends the process.
    """
    like = method.partition("(")[0]
    found = _loaded("policy", named, lambda: policy_of(named, drawn(0), like))
    if not method and all(promised(found, column) != "yes" for column in PROPERTIES):
        raise SpecError("policy", named, "must declare at least one promise in spec.policy.Promises")
    return _of_package("policy", found.name, named, OURS if named in NAMES else target_of("policy", named, POLICIES))


def of_cache(named: str) -> Subject:
    """A function that evicts inside a model.

    Raises:
        SpecError: for what names none or cannot be loaded; where what the suite needs is not installed.
        BackendUnavailable: for a module that ends the process.
    """
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise SpecError("cache", named, f"needs {needed}, which is not installed: pip install 'kvspec[models]'")
    found = _loaded("cache", named, lambda: find_plugin("cache", named, CACHES).value)
    if not callable(found):
        raise SpecError(
            "cache", named, f"must be a function with the arguments prompt_ids, kept, next_ids and model, not {found!r}"
        )
    return _of_package("cache", named, named, target_of("cache", named, CACHES))


def of_server(named: str) -> Subject:
    """A running server; it has no files, and its digest is that of what it says about itself.

    Raises:
        SpecError: if no server answers, or where what the suite needs is not installed.
    """
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise SpecError("server", named, f"needs {needed}, which is not installed: pip install 'kvspec[models]'")
    server = Server(named, "")
    models, about = server.models(), server.version()
    digest = hashlib.sha256(json.dumps([models, about]).encode()).hexdigest()
    return Subject("server", ", ".join(models) or named, "", named, "GET /v1/models and /version", digest)


def of_command(named: str) -> Subject:
    """An engine that a command starts; its files are the executable and every file that the command names, by path.

    A word of a word counts too: that of `sh -c 'exec ./engine'`, or of `--table=weights.bin`.

    Raises:
        SpecError: for a command whose executable is not there.
    """
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise SpecError("command", named, f"cannot be read: {error}") from error
    executable = shutil.which(words[0]) if words else None
    if executable is None:
        raise SpecError("command", named, "must begin with the name of an executable file")
    files = {Path(word).as_posix(): Path(word) for text in words[1:] for word in _parts(text) if _is_file(word)}
    files[Path(words[0]).as_posix() if os.sep in words[0] else f"PATH/{words[0]}"] = Path(executable)
    listed = " ".join(sorted(files))
    return Subject("command", Path(executable).name, "", named, listed, digest_of(files))


def _parts(text: str) -> list[str]:
    """A word of a command, the words in it, and what follows an equals sign."""
    with suppress(ValueError):
        return [part for word in (text, *shlex.split(text)) for part in (word, word.partition("=")[2].strip())]
    return [text]


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long, or with a null character
        return False


OF_KIND: Mapping[str, Callable[..., Subject]] = {
    "backend": of_backend, "command": of_command, "policy": of_policy, "cache": of_cache,
    "server": of_server,
}
