"""The archive under attack: killed writers, flipped bits, writers and readers at once.

`--kvspec-profile nightly` makes all kills and flips, and runs the writers and readers for a minute; otherwise it is a
fifth of them, and a second.
"""

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from conformance.own.models_integration.archive.attackers import read_for, write_for, write_until_killed
from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.processes import started
from conformance.plugin import profile_of
from models_integration.archive.objects import read_object
from models_integration.archive.store import Archive
from models_integration.cache.tensor_file import Damaged

pytestmark = pytest.mark.law("an-object-proves-itself")

KILLS = 200
FLIPS = 500  # of header and of payload: 1000
SHARE = 5
"""Of the kills and flips, one in so many, where the profile is not nightly."""


@pytest.fixture
def share(pytestconfig: pytest.Config) -> int:
    return 1 if profile_of(pytestconfig) == "nightly" else SHARE


def kill_writers(folder: Path, kills: int, naive: bool) -> int:
    """Writers killed at random moments of their work; how many visible objects are torn afterwards.

    Every fourth is killed while it opens the archive, the others while they write.
    """
    rng = random.Random(1)
    for at in range(kills):
        ready, say = multiprocessing.Pipe(duplex=False)
        child = started(write_until_killed, folder, 1000 * at, say, naive)
        if at % 4:
            ready.recv_bytes()
        time.sleep(rng.uniform(0.0, 0.03))
        child.kill()
        child.join()
        say.close()
        ready.close()
    torn = 0
    for path in (folder / "objects").glob("*/[!.]*"):
        try:
            read_object(path, path.stem, lambda _: None)
        except Damaged:
            torn += 1
    return torn


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_no_killed_writer_leaves_a_torn_object(quick_path: Path, share: int) -> None:
    """200 SIGKILLs at night; what is visible is whole and listed, no lock is left, and the archive works on."""
    assert kill_writers(quick_path, KILLS // share, naive=False) == 0
    assert list((quick_path / "objects").glob("*/.tmp-*"))
    with Archive(quick_path) as archive:
        entries = archive.entries()
        assert entries
        report = archive.verify()
        assert report.clean
        assert report.read == len(entries)
        archive.put(*chunk(5_000_000))


@pytest.mark.law("the-proof-has-teeth")
def test_a_naive_writer_does_leave_torn_objects(quick_path: Path) -> None:
    """The same kills see what they are about."""
    assert kill_writers(quick_path, KILLS // 10, naive=True) > 0


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("part", ["header", "payload"])
def test_every_flipped_bit_of_an_object_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, share: int,
) -> None:
    """Of 500 flips at night, each gives a miss and a quarantined file; the file as it was is a hit again."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only for time: nothing is killed here
    rng = random.Random(part)
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
        (path,) = (tmp_path / "objects").glob("*/*")
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        low, high = (0, header) if part == "header" else (header, len(data))
        for _ in range(FLIPS // share):
            path.write_bytes(flipped(data, rng.randrange(8 * low, 8 * high)))
            assert archive.get(key, "alice") is None
            assert not path.exists()
            (quarantined,) = (tmp_path / "quarantine").glob(f"*-{path.name}")
            quarantined.unlink()
            path.write_bytes(data)
        assert archive.get(key, "alice") is not None


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_two_writers_and_four_readers_lose_nothing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every chunk that a writer was told is stored is read by anybody, whole, and listed."""
    seconds = 60.0 if profile_of(pytestconfig) == "nightly" else 1.0
    (tmp_path / "told").mkdir()
    together = multiprocessing.get_context("forkserver").Barrier(6)
    children = [started(write_for, seconds, tmp_path, 1_000_000 * at, together) for at in (1, 2)]
    children += [started(read_for, seconds, tmp_path, at, together) for at in range(4)]
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    assert codes == [0] * 6
    told = {path.read_text() for path in (tmp_path / "told").glob("[0-9]*")}
    with Archive(tmp_path) as archive:
        assert {entry.key for entry in archive.entries()} == told
        assert len(told) > 20
        assert archive.verify().clean
