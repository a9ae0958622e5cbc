"""Subjects of a certificate: name, version and a digest of the files."""

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
from conformance.engine.values import LONGEST_NAME
from conformance.methods.method import method_of
from conformance.strategies.policy_inputs import drawn
from conformance.strategies.policy_inputs import named as policy_of
from conformance.witness.client import Server
from reference.policies.grammar import is_composition
from reference.policies.names import ENTRY_POINTS as POLICIES
from reference.policies.names import NAMES
from spec.backend import BUILT_IN, ENTRY_POINTS, FAMILIES, resolve
from spec.errors import BackendUnavailable, SpecError
from spec.plugins import find_plugin, target_of
from spec.printing import printable

CACHES = "kvspec.caches"
OURS = "reference.policies:names"


@dataclass(frozen=True)
class Subject:
    """Tested object, with the name that the certificate shows."""

    kind: str
    name: str
    version: str
    named: str
    files: str
    digest: str


def digest_of(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the text that `sha256sum` prints for the files, sorted by name."""
    lines = [f"{hashlib.sha256(files[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _files_of_package(top: str) -> dict[str, Path]:
    """Return all files of a top-level package except `__pycache__`, or the file of a module."""
    actual = find_spec(top)
    assert actual is not None  # The module was imported.
    if not actual.submodule_search_locations:
        return {Path(str(actual.origin)).name: Path(str(actual.origin))}
    return {
        f"{top}/{path.relative_to(home).as_posix()}": path
        for home in map(Path, actual.submodule_search_locations) for path in home.rglob("*")
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
    """Return the subject of a backend.

    Raises:
        SpecError: if the name is not the name of a backend.
        BackendUnavailable: if the backend cannot be loaded, or has no stage family.
    """
    result = _loaded("backend", named, lambda: resolve(named))
    if all(getattr(result, family) is None for family in FAMILIES):
        raise BackendUnavailable(f"backend {result.name!r} has no stage family, so kvspec cannot test the backend")
    return _of_package("backend", result.name, named, BUILT_IN.get(named) or target_of("backend", named, ENTRY_POINTS))


def _loaded(kind: str, named: str, find: Callable[[], Any]) -> Any:
    try:
        return find()
    except (SpecError, BackendUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:  # The module may raise any exception.
        message = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(f"{kind} {named!r} cannot be loaded, because the module raises {message}") from error


def _of_package(kind: str, name: str, named: str, target: str) -> Subject:
    top = target.partition(":")[0].partition(".")[0]
    files = _files_of_package(top)
    return Subject(kind, name, _version_of(top), named, f"{len(files)} of {top}", digest_of(files))


def of_policy(named: str, method: str = "") -> Subject:
    """Return the subject of a policy that promises a property, or that is compared with a method.

    Raises:
        SpecError: if the policy does not exist, cannot be loaded, or promises nothing.
        BackendUnavailable: if the module cannot be loaded, for example because it ends the process.
    """
    like = method_of(method).name if method else ""
    result = _loaded("policy", named, lambda: policy_of(named, drawn(0), like))
    if not method and all(promised(result, column) != "yes" for column in PROPERTIES):
        raise SpecError("policy", named, "must declare at least one promise in spec.policy.Promises")
    ours = named in NAMES or is_composition(named)
    return _of_package("policy", named, named, OURS if ours else target_of("policy", named, POLICIES))


def of_cache(named: str) -> Subject:
    """Return the subject of a function that evicts inside a model.

    Raises:
        SpecError: if the function does not exist or is not callable, or if torch or transformers is not installed.
        BackendUnavailable: if the module cannot be loaded, for example because it ends the process.
    """
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise SpecError("cache", named, f"needs {needed}, which is not installed: pip install 'kvspec[models]'")
    result = _loaded("cache", named, lambda: find_plugin("cache", named, CACHES).value)
    if not callable(result):
        raise SpecError(
            "cache", named,
            f"must be a function with the arguments prompt_ids, kept, next_ids and model, not {result!r}",
        )
    return _of_package("cache", named, named, target_of("cache", named, CACHES))


def of_server(named: str, model: str) -> Subject:
    """Return the subject of a running server. A server has no files, so the digest covers its own description.

    Raises:
        SpecError: if torch or transformers is not installed, or if no server answers. Also if the server has no model
            of this name, or completes neither token ids nor text.
    """
    for needed in ("torch", "transformers"):
        if find_spec(needed) is None:
            raise SpecError("server", named, f"needs {needed}, which is not installed: pip install 'kvspec[models]'")
    server = Server.of(named, model)
    server.completes_ids()
    models, about = server.models(), server.version()
    digest = hashlib.sha256(json.dumps([models, about]).encode()).hexdigest()
    name = ", ".join(printable(one, LONGEST_NAME) for one in models) or named
    return Subject("server", name, "", named, "GET /v1/models and /version", digest)


def of_command(named: str) -> Subject:
    """Return the subject of an engine that a command starts.

    The files are the executable and every file that the command names by path. A word inside a word also counts, as in
    `sh -c 'exec ./engine'` or `--table=weights.bin`.

    Raises:
        SpecError: if the command cannot be parsed, or if the executable does not exist.
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
    """Return a word of a command, the words inside the word, and the text after each equals sign."""
    with suppress(ValueError):
        return [part for word in (text, *shlex.split(text)) for part in (word, word.partition("=")[2].strip())]
    return [text]


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # The word is too long or contains a null character.
        return False


OF_KIND: Mapping[str, Callable[..., Subject]] = {
    "backend": of_backend, "command": of_command, "policy": of_policy, "cache": of_cache,
    "server": of_server,
}
