"""A third party's exceptions: tests that an implementation is known not to pass, each with its reason.

    [[exception]]
    item = "CC-SALIENCE"              # or: test = "test_coattention.py::test_name"
    kind = "xfail"                    # or: "skip"
    reason = "our S1 counts chunks from the cache's first token"

An entry that names no known item or test, or gives no reason, fails the run: exceptions must not rot.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Exemption", "apply", "items_marked", "read"]

_KEYS = {"item", "test", "kind", "reason"}


@dataclass(frozen=True)
class Exemption:
    """One entry: which tests, and what becomes of them."""

    subject: str
    by_item: bool
    kind: str
    reason: str

    def covers(self, item: pytest.Item) -> bool:
        if self.by_item:
            return self.subject in items_marked(item)
        return item.nodeid.partition("[")[0].endswith(self.subject)


def items_marked(item: pytest.Item) -> list[str]:
    """The ids in a test's `spec` markers."""
    return [name for mark in item.iter_markers("spec") for name in mark.args]


def read(path: Path, known_items: frozenset[str]) -> list[Exemption]:
    """The entries of a file.

    Raises:
        pytest.UsageError: for an entry that is not complete, or names an unknown item.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("exception", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise pytest.UsageError(f"{path}: {error}") from error
    return [_entry(f"{path}, exception {number}", entry, known_items) for number, entry in enumerate(entries, 1)]


def _entry(where: str, entry: dict[str, object], known_items: frozenset[str]) -> Exemption:
    if unknown := sorted(entry.keys() - _KEYS):
        raise pytest.UsageError(f"{where}: unknown keys {', '.join(unknown)}")
    if ("item" in entry) == ("test" in entry):
        raise pytest.UsageError(f"{where}: name either an item or a test")
    if entry.get("kind") not in ("skip", "xfail"):
        raise pytest.UsageError(f"{where}: kind must be 'skip' or 'xfail'")
    reason = str(entry.get("reason", "")).strip()
    if not reason:
        raise pytest.UsageError(f"{where}: needs a reason")
    if known_items and "item" in entry and entry["item"] not in known_items:
        raise pytest.UsageError(f"{where}: unknown item {entry['item']!r}")
    return Exemption(str(entry.get("item", entry.get("test"))), "item" in entry, str(entry["kind"]), reason)


def apply(exceptions: Iterable[Exemption], tests: list[pytest.Item]) -> None:
    """Mark the covered tests.

    Raises:
        pytest.UsageError: when an entry names a test of a collected file that does not exist.
    """
    for exception in exceptions:
        covered = [test for test in tests if exception.covers(test)]
        for test in covered:
            if exception.kind == "skip":
                test.add_marker(pytest.mark.skip(reason=exception.reason))
            else:
                test.add_marker(pytest.mark.xfail(reason=exception.reason, strict=True))
        file = exception.subject.partition("::")[0]
        if not covered and not exception.by_item and any(f"{file}::" in test.nodeid for test in tests):
            raise pytest.UsageError(f"exceptions: unknown test {exception.subject!r}")
