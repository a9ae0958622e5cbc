"""Pinned selections: chosen once, used by every arm, and named in every result."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from models_integration.archive.errors import ForeignVersion, OtherPins, named_errors
from models_integration.cache.atomic_file import publish

__all__ = ["Pins", "corpus_digest", "same_pins"]

SCHEMA = 1


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
            ForeignVersion: for another schema.
            OtherPins: when the chunks are not those that were pinned.
        """
        found = json.loads(path.read_text(encoding="ascii"))
        if found["schema"] != SCHEMA:
            raise ForeignVersion(f"{path} has schema {found['schema']}; this is {SCHEMA}")
        if found["corpus"] != corpus:
            raise OtherPins(f"{path} pins chunks of corpus {found['corpus'][:16]}, these are {corpus[:16]}")
        chosen = {query: tuple(names) for query, names in found["chosen"].items()}
        return cls(found["corpus"], found["stack"], chosen, found["schema"])


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
