"""A third party's exceptions: what an implementation is known not to pass, each with its reason, issue and expiry.

    [[exception]]
    item = "CC-SALIENCE"              # or: test = "test_coattention.py::test_name", one case as "...::test_name[case]"
    kind = "xfail"                    # or: vector = "coattention-12"; kind "skip", where running it does harm
    reason = "our S1 counts chunks from the cache's first token"
    issue = "https://example.org/issues/7"
    expiry = 2027-03-31               # the first day on which the entry is an error

An entry that is not complete, has expired, or names nothing that there is, fails the run: exceptions must not rot. One
that covers no failure any more does not, since other examples may fail again: `kvspec verify` reports it as no longer
needed, the certificate lists it, and `--check` names it where that has changed.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

_GRAINS = ("item", "test", "vector")
_TEXTS = ("kind", "reason", "issue")
_OF_VECTORS = "test_vectors.py::test_the_backend_holds_a_vector_of_a_stage"
_KEYS = {*_GRAINS, *_TEXTS, "expiry"}


@dataclass(frozen=True)
class Exemption:
    """One entry: which tests, and what becomes of them."""

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
    """A test as file::function[case], wherever pytest was started: a node id begins at its own root."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def items_marked(item: pytest.Item) -> list[str]:
    """The ids in a test's `spec` markers."""
    return [name for mark in item.iter_markers("spec") for name in mark.args]


def read(path: Path, known_items: frozenset[str], known_vectors: frozenset[str]) -> list[Exemption]:
    """The entries of a file.

    Raises:
        pytest.UsageError: for an entry that is not complete, has expired, or names an unknown item or vector.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("exception", [])
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"{path}: {error}") from error
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
    kind, reason, issue = (str(entry.get(key, "")).strip() for key in _TEXTS)
    if not (reason and issue):
        raise pytest.UsageError(f"{where}: needs a reason and an issue")
    expiry, subject = entry.get("expiry"), str(entry[grains[0]])
    if type(expiry) is not date:
        raise pytest.UsageError(f"{where}: needs an expiry date, such as 2027-03-31")
    if expiry <= date.today():
        raise pytest.UsageError(f"{where}: the exception of {subject!r} expired on {expiry}")
    if grains[0] in known and subject not in known[grains[0]]:
        raise pytest.UsageError(f"{where}: unknown {grains[0]} {subject!r}")
    return Exemption(subject, grains[0], kind, f"{reason} ({issue}; until {expiry})")


def apply(exceptions: Iterable[Exemption], tests: list[pytest.Item]) -> None:
    """Mark the covered tests, also among their properties; one that passes all the same is no failure."""
    for exception in exceptions:
        for test in tests:
            if exception.covers(test):
                mark = pytest.mark.skip if exception.kind == "skip" else pytest.mark.xfail(strict=False)
                test.add_marker(mark(reason=exception.reason))
                test.user_properties.append((exception.kind, exception.subject))


def refuse_unknown(exceptions: Iterable[Exemption], tests: list[pytest.Item]) -> None:
    """Every entry names a test, where the whole of its file is collected.

    Raises:
        pytest.UsageError: otherwise.
    """
    for exception in exceptions:
        file = exception.subject.partition("::")[0]
        there = exception.grain != "test" or any(map(exception.covers, tests))
        if not there and any(test.path.name == file for test in tests):
            raise pytest.UsageError(f"exceptions: unknown test {exception.subject!r}")
