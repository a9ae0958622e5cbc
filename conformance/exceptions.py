"""Exceptions files: known failures of an implementation, each with a reason, an issue and an expiry date.

    [[exception]]
    item = "CC-SALIENCE"              # or: test = "test_coattention.py::test_name", one case as "...::test_name[case]"
    kind = "xfail"                    # or: vector = "coattention-12"; kind "skip", where running it does harm
    reason = "our S1 counts chunks from the cache's first token"
    issue = "https://example.org/issues/7"
    expiry = 2027-03-31               # the first day on which the entry is an error

The run fails if an entry is incomplete, has expired or names an unknown item, test or vector, because exceptions must
not become stale. An entry that covers no failure is allowed, because other examples may fail again. `kvspec verify`
reports such an entry as no longer needed, and the certificate lists the entry. `kvspec verify --check` reports entries
that have changed in this respect.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

from spec.files import parse_toml, read_bytes

_GRAINS = ("item", "test", "vector")
_TEXTS = ("kind", "reason", "issue")
_OF_VECTORS = "test_vectors.py::test_the_backend_holds_a_vector_of_a_stage"
_KEYS = {*_GRAINS, *_TEXTS, "expiry"}


@dataclass(frozen=True)
class Exemption:
    """One entry of an exceptions file: the excepted item, test or vector, and the kind of the exception."""

    subject: str
    grain: str
    kind: str
    reason: str

    def covers(self, item: pytest.Item) -> bool:
        if self.grain == "item":
            return self.subject in items_marked(item)
        if self.grain == "vector":
            return _named(item) == f"{_OF_VECTORS}[{self.subject}]"
        return self.subject in (_named(item), _named(item).partition("[")[0])


def _named(item: pytest.Item) -> str:
    """Return a test as file::function[case]. A node id depends on the folder from which pytest was started."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def items_marked(item: pytest.Item) -> list[str]:
    """Return the ids in a test's `spec` markers."""
    return [name for mark in item.iter_markers("spec") for name in mark.args]


def read(path: Path, known_items: frozenset[str], known_vectors: frozenset[str]) -> list[Exemption]:
    """Return the entries of a file.

    Raises:
        pytest.UsageError: if the file has a different table, or if an entry is incomplete, has expired, or names an
            unknown item or vector.
    """
    try:
        whole = parse_toml(read_bytes(path).decode())
    except OSError as error:
        raise pytest.UsageError(f"exceptions = {str(path)!r}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise pytest.UsageError(f"{path}: {error}") from error
    certificate = whole.keys() >= {"run", "counts"}  # `kvspec verify --check` reads the exceptions of a certificate
    if (unknown := sorted(whole.keys() - {"exception"})) and not certificate:
        raise pytest.UsageError(f"{path}: unknown table {unknown[0]}: type [[exception]]")
    entries = whole.get("exception", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise pytest.UsageError(f"{path}: exception must be a list of tables: type [[exception]]")
    known = {"item": known_items, "vector": known_vectors}
    return [_entry(f"{path}, exception {number}", entry, known) for number, entry in enumerate(entries, 1)]


def _entry(where: str, entry: dict[str, object], known: dict[str, frozenset[str]]) -> Exemption:
    if unknown := sorted(entry.keys() - _KEYS):
        raise pytest.UsageError(f"{where}: unknown keys {', '.join(unknown)}")
    grains = [grain for grain in _GRAINS if grain in entry]
    if len(grains) != 1:
        raise pytest.UsageError(f"{where}: name either an item, a test or a vector")
    if entry.get("kind") not in ("skip", "xfail"):
        raise pytest.UsageError(f"{where}: kind must be 'skip' or 'xfail'")
    texts = [entry.get(key, "") for key in (*_TEXTS, grains[0])]
    for key, text in zip((*_TEXTS, grains[0]), texts, strict=True):
        if not isinstance(text, str):
            raise pytest.UsageError(f'{where}: {key} = {text!r}: must be text in quotes: type {key} = "..."')
    kind, reason, issue, subject = (str(text).strip() for text in texts)
    if not (reason and issue):
        raise pytest.UsageError(f"{where}: needs a reason and an issue")
    expiry = entry.get("expiry")
    if type(expiry) is not date:
        raise pytest.UsageError(f"{where}: needs an expiry date without quotes, such as expiry = 2027-03-31")
    if expiry <= date.today():
        raise pytest.UsageError(f"{where}: the exception of {subject!r} expired on {expiry}")
    if grains[0] in known and subject not in known[grains[0]]:
        raise pytest.UsageError(f"{where}: unknown {grains[0]} {subject!r}")
    return Exemption(subject, grains[0], kind, f"{reason} ({issue}; until {expiry})")


def apply(exceptions: Iterable[Exemption], tests: list[pytest.Item]) -> None:
    """Mark the covered tests, and add the exception to their properties.

    A covered test that passes does not fail the run.
    """
    for exception in exceptions:
        for test in tests:
            if exception.covers(test):
                mark = pytest.mark.skip if exception.kind == "skip" else pytest.mark.xfail(strict=False)
                test.add_marker(mark(reason=exception.reason))
                test.user_properties.append((exception.kind, exception.subject))


def refuse_unknown(exceptions: Iterable[Exemption], tests: list[pytest.Item]) -> None:
    """Check that every entry for a test names an existing test, if all tests of the file were collected.

    Raises:
        pytest.UsageError: if the test of an entry does not exist.
    """
    for exception in exceptions:
        file = exception.subject.partition("::")[0]
        there = exception.grain != "test" or any(map(exception.covers, tests))
        if not there and any(test.path.name == file for test in tests):
            raise pytest.UsageError(f"exceptions: unknown test {exception.subject!r}")
