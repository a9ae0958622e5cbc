"""What the processes do that attack an archive."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from conformance.own.models_integration.archive.chunks import chunk
from models_integration.archive import object_folder
from models_integration.archive.errors import ArchiveFull, ArchiveReadOnly
from models_integration.archive.store import Archive
from models_integration.cache import atomic_file as files

__all__ = [
    "fill_the_disk", "lose_the_right_to_write", "read_for", "read_where_nothing_can_be_written", "write_for",
    "write_until_killed",
]

TOKENS = 400
NOBODY = 65534
PUTS_LEAST = 12


def write_slowly(descriptor: int, parts: Sequence[memoryview]) -> None:
    """A disk of 8 MB a second, so that kills fall into writes."""
    for part in parts:
        for at in range(0, len(part), 1 << 13):
            os.write(descriptor, part[at : at + (1 << 13)])
            time.sleep(0.001)


def publish_naively(
    path: Path, parts: list[memoryview], replace: bool = True, late: files.Late | None = None,
    write: Callable[[int, Sequence[memoryview]], None] = write_slowly,
) -> None:
    """What the archive must not do: write under the object's own name."""
    if late is not None:
        head = bytearray(parts[0])
        head[late.offset : late.offset + 64] = late.compute()
        parts = [memoryview(head), *parts[1:]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        write(file.fileno(), parts)


def write_until_killed(folder: Path, first: int, ready: Connection, naive: bool) -> None:
    """Put ten chunks, slowly; `ready` gets a byte whenever one is about to be written."""
    def write(descriptor: int, parts: Sequence[memoryview]) -> None:
        ready.send_bytes(b"x")
        write_slowly(descriptor, parts)

    torch.set_num_threads(1)
    if naive:
        vars(object_folder)["publish"] = partial(publish_naively, write=write)
    else:
        vars(files)["_write"] = write
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


def fill_the_disk(folder: Path) -> None:
    """Put a chunk where no file may grow beyond 64 KiB; anything but the named error is raised."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Archive(folder) as archive:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            archive.put(*chunk(2, tokens=4096))
        except ArchiveFull:
            return
        raise AssertionError("a full disk went unnoticed")


def lose_the_right_to_write(folder: Path) -> None:
    """Put, get and open where no folder can be written, as a user who is not root; any other end is raised."""
    torch.set_num_threads(1)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    home = folder / "archive"
    with Archive(home) as archive:
        key = archive.put(*chunk(1))
        folders = [home, *(path for path in home.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(0o500)
        try:
            for refused in (lambda: archive.put(*chunk(2)), lambda: Archive(home / "new")):
                try:
                    refused()
                except ArchiveReadOnly:
                    continue
                raise AssertionError("a read-only folder went unnoticed")
            assert archive.get(key, "alice") is not None
        finally:
            for path in folders:
                path.chmod(0o700)
        assert archive.verify().clean
        archive.put(*chunk(2))
        assert len(archive.entries()) == 2


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
