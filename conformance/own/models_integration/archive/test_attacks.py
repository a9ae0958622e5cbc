"""The archive under attack: killed writers, flipped bits, writers and readers at once."""

import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from conformance.own.models_integration.archive.fault_cases import chunk, opened
from conformance.own.processes import started
from conformance.plugin import profile_of
from models_integration.archive.errors import ArchiveReadOnly
from models_integration.archive.objects import read_object
from models_integration.archive.store import Archive
from models_integration.cache import atomic_file as files

pytestmark = pytest.mark.law("an-object-proves-itself")

TOKENS = 400
NOBODY = 65534
PUTS_LEAST = 12


def write_slowly(ready: Connection, descriptor: int, parts: Sequence[memoryview]) -> None:
    """A disk of 8 MB a second, so that kills fall into writes; `ready` gets a byte before each 8 KB."""
    for part in parts:
        for at in range(0, len(part), 1 << 13):
            ready.send_bytes(b"x")
            os.write(descriptor, part[at : at + (1 << 13)])
            time.sleep(0.001)


def write_until_killed(folder: Path, first: int, ready: Connection) -> None:
    """Put ten chunks, slowly; `ready` gets a byte whenever 8 KB are about to be written."""
    torch.set_num_threads(1)
    vars(files)["_write"] = partial(write_slowly, ready)
    chunks = [chunk(seed, tokens=TOKENS) for seed in range(first, first + 10)]
    with Archive(folder) as archive:
        for made in chunks:
            archive.put(*made)


def write_for(seconds: float, folder: Path, first: int, together: Barrier) -> None:
    """Put chunks for some seconds, and some on any machine, once all others are ready.

    Of each it tells under `told` when it is stored.
    """
    torch.set_num_threads(1)
    with Archive(folder) as archive:
        together.wait()
        seed, end = first, time.monotonic() + seconds
        while seed < first + PUTS_LEAST or time.monotonic() < end:
            manifest, tensors = chunk(seed, tokens=64)
            archive.put(manifest, tensors)
            files.publish(folder / "told" / str(seed), [memoryview(manifest.key.encode())])
            seed += 1


def read_for(seconds: float, folder: Path, seed: int, together: Barrier) -> None:
    """Get chunks that were told of, and compare them, for some seconds, once all others are ready."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    with Archive(folder) as archive:
        together.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            told = [path for path in (folder / "told").glob("*") if not path.name.startswith(".")]
            for path in rng.sample(told, min(20, len(told))):
                found = archive.get(path.read_text(), "alice")
                _, tensors = chunk(int(path.name), tokens=64)
                assert found is not None
                assert torch.equal(found.tensors["1.v"], tensors["1.v"])
            archive.entries()


def read_where_nothing_can_be_written(folder: Path) -> None:
    """Open and read an archive whose files and folders cannot be written, as a user who is not root."""
    torch.set_num_threads(1)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    home = folder / "archive"
    with Archive(home) as archive:
        keys = [archive.put(*chunk(seed)) for seed in range(3)]
    damaged = home / "objects" / keys[2][:2] / f"{keys[2]}.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    everything = [home, *home.rglob("*")]
    for path in everything:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with Archive(home, limit=1 << 20) as archive:
            assert [entry.key for entry in archive.entries()] == keys
            assert archive.get(keys[0], "alice") is not None
            assert archive.get(keys[2], "alice") is None
            assert archive.verify().quarantined == [keys[2]]
            assert archive.put(*chunk(0)) == keys[0]
            for refused in (
                lambda: archive.put(*chunk(7)), Archive(home, limit=1).gc, lambda: archive.forget("alice"),
            ):
                try:
                    refused()
                except ArchiveReadOnly:
                    continue
                raise AssertionError("a read-only folder went unnoticed")
            assert archive.get(keys[1], "alice") is not None
    finally:
        for path in everything:
            path.chmod(0o700 if path.is_dir() else 0o600)


KILLS = 200
FLIPS = 500  # of header and of payload: 1000
WRITTEN_MOST = 30
"""Pieces of 8 KB that a writer begins to write before it is killed: ten are a chunk."""
SHARE = 5
"""Of the kills and flips, one in so many, where the profile is not nightly."""


@pytest.fixture
def share(pytestconfig: pytest.Config) -> int:
    return 1 if profile_of(pytestconfig) == "nightly" else SHARE


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_no_killed_writer_leaves_a_torn_object(quick_path: Path, share: int) -> None:
    """200 SIGKILLs at night; what is visible is whole and listed, no lock is left, and the archive works on.

    Every fourth writer is killed while it opens the archive, the others while they write one of the first three chunks.
    """
    rng = random.Random(1)
    for at in range(KILLS // share):
        ready, say = multiprocessing.Pipe(duplex=False)
        child = started(write_until_killed, quick_path, 1000 * at, say)
        if at % 4:
            for _ in range(rng.randint(1, WRITTEN_MOST)):
                ready.recv_bytes()
        else:
            time.sleep(rng.uniform(0.0, 0.03))
        child.kill()
        child.join()
        say.close()
        ready.close()
    for path in (quick_path / "objects").glob("*/[!.]*"):
        read_object(path, path.stem, lambda _: None)  # raises Damaged where it is torn
    assert list((quick_path / "objects").glob("*/.tmp-*"))  # kills have come into the middle of writes
    with Archive(quick_path) as archive:
        entries = archive.entries()
        assert entries
        report = archive.verify()
        assert report.clean
        assert report.read == len(entries)
        archive.put(*chunk(5_000_000))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("part", ["header", "payload"])
def test_every_flipped_bit_of_an_object_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, encrypted: bool, share: int,
) -> None:
    """Of 500 flips at night, each gives a miss and a quarantined file; the file as it was is a hit again."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only for time: nothing is killed here
    rng = random.Random(part)
    with opened(tmp_path, encrypted) as archive:
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
