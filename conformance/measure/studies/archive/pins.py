"""Pinned selections: chosen once, used by every arm, and named in every result."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models_integration.archive.errors import ArchiveError, ForeignVersion, named_errors
from models_integration.cache.atomic_file import publish

__all__ = ["DamagedPins", "OtherPins", "Pins", "corpus_digest", "same_pins"]

SCHEMA = 1


class DamagedPins(ArchiveError):
    """The file holds no pinned selections."""


class OtherPins(ArchiveError):
    """Results under different pinned selections are not comparable."""


@dataclass(frozen=True)
class Pins:
    """Which chunks each query gets."""

    corpus: str
    """`corpus_digest` of the chunks."""
    stack: Mapping[str, str]
    """What chose them: programs with versions, models with digests."""
    chosen: Mapping[str, tuple[str, ...]]
    """Chunk names by query."""
    schema: int = SCHEMA

    def text(self) -> str:
        """Canonical JSON: the same selections have the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def digest(self) -> str:
        """sha256 of the file; stands in every result."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        with named_errors(path):
            publish(path, [memoryview(self.text().encode())])

    @classmethod
    def load(cls, path: Path, corpus: str) -> "Pins":
        """Read the file.

        Raises:
            OSError: when there is no such file, or it cannot be read.
            DamagedPins: when it holds anything but pinned selections.
            ForeignVersion: for another schema.
            OtherPins: when the chunks are not those that were pinned.
        """
        found = _read(path)
        if found["corpus"] != corpus:
            raise OtherPins(f"{path} pins chunks of corpus {found['corpus'][:16]}, these are {corpus[:16]}")
        chosen = {query: tuple(names) for query, names in found["chosen"].items()}
        return cls(found["corpus"], found["stack"], chosen, found["schema"])


def _read(path: Path) -> dict[str, Any]:
    """The file's object, with every part of the kind that it must be."""
    try:
        found = json.loads(path.read_bytes().decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise DamagedPins(f"{path} holds no pinned selections: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise DamagedPins(f"{path} holds no pinned selections: there is no schema")
    if found["schema"] != SCHEMA:
        raise ForeignVersion(f"{path} has schema {found['schema']}; this is {SCHEMA}")
    if not isinstance(found.get("corpus"), str):
        raise DamagedPins(f"{path} holds no pinned selections: corpus must be text")
    if not _is_texts(found.get("stack")):
        raise DamagedPins(f"{path} holds no pinned selections: stack must be texts by name")
    chosen = found.get("chosen")
    lists = chosen.values() if isinstance(chosen, dict) else (None,)
    if not all(isinstance(names, list) and _all_text(names) for names in lists):
        raise DamagedPins(f"{path} holds no pinned selections: chosen must be lists of names by query")
    return found


def _is_texts(given: object) -> bool:
    return isinstance(given, dict) and _all_text(given.values())


def _all_text(given: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in given)


def corpus_digest(corpus: Mapping[str, Sequence[int]]) -> str:
    """sha256 of chunk names and token ids."""
    text = json.dumps({name: list(ids) for name, ids in corpus.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def same_pins(digests: Iterable[str]) -> str:
    """The one digest of results that may be compared.

    Raises:
        OtherPins: when there are several: a difference would be of selections, not of arms.
    """
    found = sorted(set(digests))
    if len(found) != 1:
        raise OtherPins(f"results under {len(found)} pin files are not comparable: {', '.join(d[:16] for d in found)}")
    return found[0]
