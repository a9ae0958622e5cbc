"""Selections that are pinned: their file, what it refuses, and results that may be compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.measure.studies.archive.pins import DamagedPins, OtherPins, Pins, corpus_digest, same_pins
from models_integration.archive.errors import ForeignVersion


def pins(**changes: tuple[str, ...]) -> Pins:
    return Pins("corpus", {"bm25s": "0.3"}, {"q": ("a", "b", "c"), "r": ("b",), **changes})


@pytest.mark.law("saved-is-what-was")
def test_pins_survive_their_file_and_have_one_digest(tmp_path: Path) -> None:
    """In another process and in another order too."""
    path = tmp_path / "pins.json"
    pins().save(path)
    assert Pins.load(path, "corpus") == pins()
    code = (
        "from conformance.measure.studies.archive.pins import Pins;"
        "print(Pins('corpus', {'bm25s': '0.3'}, {'r': ('b',), 'q': ('a', 'b', 'c')}).digest)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == pins().digest == Pins.load(path, "corpus").digest
    assert pins(r=("c",)).digest != pins().digest


@pytest.mark.law("refused-before-anything-changes")
def test_pins_of_other_chunks_or_of_another_schema_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    pins().save(path)
    with pytest.raises(OtherPins, match="pins chunks of corpus"):
        Pins.load(path, corpus_digest({"a": [1, 2]}))
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    with pytest.raises(ForeignVersion):
        Pins.load(path, "corpus")


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize(
    "junk",
    [
        b"", b"{", b"[]", b"null", b"1", b"{}", b"\xff", b'{"schema": "1"}', b'{"schema": 1}',
        b'{"schema": 1, "corpus": 3, "stack": {}, "chosen": {}}',
        b'{"schema": 1, "corpus": "corpus", "stack": [], "chosen": {}}',
        b'{"schema": 1, "corpus": "corpus", "stack": {"a": 1}, "chosen": {}}',
        b'{"schema": 1, "corpus": "corpus", "stack": {}, "chosen": []}',
        b'{"schema": 1, "corpus": "corpus", "stack": {}, "chosen": {"q": "abc"}}',
        b'{"schema": 1, "corpus": "corpus", "stack": {}, "chosen": {"q": [1]}}', b"[" * 100_000,
    ],
)
def test_a_file_that_holds_no_pins_is_named(junk: bytes, tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    path.write_bytes(junk)
    with pytest.raises(DamagedPins, match=r"pins\.json"):
        Pins.load(path, "corpus")


@pytest.mark.law("an-identity-tells-apart")
def test_results_under_other_pins_are_not_compared() -> None:
    assert same_pins([pins().digest] * 3) == pins().digest
    with pytest.raises(OtherPins, match="2 pin files"):
        same_pins([pins().digest, pins(r=("c",)).digest])
    assert corpus_digest({"a": [1], "b": [2]}) == corpus_digest({"b": [2], "a": [1]})
    assert corpus_digest({"a": [1], "b": [2]}) != corpus_digest({"a": [1], "b": [3]})
