"""A fault at every call to the system that the archive makes, one at a time.

Afterwards the archive opens, what was promised is there, what was forgotten is not, and nothing else has changed. Under
`--kvspec-profile nightly` every call fails once with each error, and is killed once; otherwise a sample of them.
"""

import ast
import errno
import fcntl
import multiprocessing
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from inspect import getsource
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from conformance.assurance.faults import CALLS, SHORT, faults
from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.models_integration.archive.fault_cases import OPERATIONS, Case, killed, path_of
from conformance.own.processes import started
from conformance.plugin import profile_of
from models_integration.archive import keyring, object_folder, objects, store
from models_integration.archive.errors import ArchiveError, ArchiveFull
from models_integration.archive.keyring import Cipher, Keyring
from models_integration.archive.manifest import Manifest
from models_integration.archive.object_folder import ASIDE
from models_integration.archive.objects import Claim, read_object
from models_integration.archive.store import Archive, Report, Stored
from models_integration.cache import atomic_file, tensor_file
from models_integration.cache.atomic_file import TEMPORARY, erase
from models_integration.cache.tensor_file import Damaged

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

ERRORS = {**{errno.errorcode[number]: number for number in (errno.ENOSPC, errno.EIO, errno.EROFS)}, "short": SHORT}
SAMPLE, KILLED_SAMPLE = 3, 1
"""Of each case, where the profile is not nightly."""
LEAST_STEP, STEP = 128, 8192
"""Bytes between two sizes of a full disk."""
MODULES = (atomic_file, tensor_file, keyring, object_folder, objects, store)
WITHOUT_THE_SYSTEM = {"fspath", "strerror", "getpid"}

for_both = pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
for_each = pytest.mark.parametrize("operation", OPERATIONS)


def prepared(folder: Path, operation: str, encrypted: bool) -> Case:
    if encrypted:
        pytest.importorskip("cryptography")
    case = Case(folder, operation, encrypted)
    case.prepare()
    return case


def chosen(template: Case, number: int, config: pytest.Config, sample: int) -> Iterator[tuple[int, Case]]:
    """Numbers of calls, of as many kinds as can be, each with a copy of the archive."""
    calls = template.copied(template.folder.parent / "counted").attempt(0, number)[1]
    every = list(range(1, len(calls) + 1))
    if profile_of(config) != "nightly":
        rng = random.Random(f"{template.operation} {number} {template.encrypted}")
        rng.shuffle(every)
        one_of_each = {calls[at - 1]: at for at in every}
        every = rng.sample(list(one_of_each.values()), min(sample, len(one_of_each)))
    for at in every:
        case = template.copied(template.folder.parent / str(at))
        yield at, case
        shutil.rmtree(case.folder)


@for_both
@pytest.mark.parametrize("number", ERRORS.values(), ids=ERRORS)
@for_each
def test_no_failing_call_makes_the_archive_unusable(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, number: int, encrypted: bool,
) -> None:
    template = prepared(quick_path / "template", operation, encrypted)
    for at, case in chosen(template, number, pytestconfig, SAMPLE):
        before = descriptors()
        done, _ = case.attempt(at, number)
        assert descriptors() == before
        case.check(done)


def descriptors() -> int:
    """How many this process has."""
    listed = Path("/proc/self/fd")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


@for_both
@for_each
def test_no_kill_makes_the_archive_unusable(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, encrypted: bool,
) -> None:
    template = prepared(quick_path / "template", operation, encrypted)
    for at, case in chosen(template, errno.EIO, pytestconfig, KILLED_SAMPLE):
        heard, say = multiprocessing.Pipe(duplex=False)
        child = started(killed, case, at, say)
        child.join()
        assert child.exitcode == -9
        case.check(heard.poll(), killed=True)
        say.close()
        heard.close()


def get_hers(archive: Archive, key: str) -> Stored | None:
    return archive.get(key, "alice")


def verified(archive: Archive, key: str) -> Report:
    return archive.verify()


@pytest.mark.parametrize("number", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("work", [get_hers, verified])
def test_a_chunk_that_was_set_aside_is_there_or_the_failure_is_named(
    quick_path: Path, number: int, work: Callable[[Archive, str], Stored | Report | None],
) -> None:
    """A reader was killed while it had another process's chunk out of its place; then each call fails once."""
    with Archive(quick_path) as archive:
        path = path_of(quick_path, key := archive.put(*chunk(1)))
        for shard in {*path.parent.parent.iterdir()} - {path.parent}:
            shard.rmdir()
        at, failed = 0, True
        while failed:
            at += 1
            path.rename(path.with_name(f"{TEMPORARY}{path.name}-{at:08x}{ASIDE}"))
            with faults(at, number) as made, suppress(ArchiveError, OSError):
                found = work(archive, key)
                assert found is not None, made.calls
                assert not isinstance(found, Report) or found.clean <= (found.read == 1), made.calls
            assert archive.get(key, "alice") is not None
            failed = len(made.calls) >= at
        assert at > 3


@for_both
@for_each
def test_a_full_disk_stops_neither_erasing_nor_opening(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, encrypted: bool,
) -> None:
    """No file may grow beyond a size, of any between nothing and all that the operation needs: the kernel refuses."""
    template = prepared(quick_path / "template", operation, encrypted)
    size, done = 0, False
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    while not done or size < 1 << 16:
        case = template.copied(quick_path / str(size))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with case.open() as archive:
                OPERATIONS[operation](archive, case.keys)
            done = True
        except ArchiveFull:
            done = False
            assert operation == "put"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        case.check(done)
        shutil.rmtree(case.folder)
        size += LEAST_STEP if profile_of(pytestconfig) == "nightly" else STEP


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_call_of_the_archive_can_fail(module: ModuleType) -> None:
    """No function of `os` or `fcntl` is called that the faults leave out."""
    rooms: dict[str, ModuleType] = {"os": os, "fcntl": fcntl}
    for node in ast.walk(ast.parse(getsource(module))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in rooms:
            room = rooms[node.value.id]
            if callable(getattr(room, node.attr, None)):
                assert node.attr in {*CALLS[room], *WITHOUT_THE_SYSTEM}, f"{node.value.id}.{node.attr}"


def write_once(descriptor: int, parts: Sequence[memoryview]) -> None:
    """What writing must not do: take it for done when the system returns."""
    os.writev(descriptor, parts)


def quarantining(
    path: Path, key: str, cipher: Callable[[Claim], Cipher | None],
) -> tuple[Manifest, dict[str, Tensor]]:
    """What reading must not do: take an error of the disk for damage."""
    try:
        return read_object(path, key, cipher)
    except OSError as error:
        raise Damaged(str(error)) from error


def keep_the_key(ring: Keyring, tenant: str) -> None:
    """What forgetting must not do: go on as if the key were gone."""
    with suppress(OSError):
        erase(ring.folder / ring._owner(tenant))


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(
    ("operation", "number", "call", "place", "wrong"),
    [
        ("put", SHORT, "writev", "cache.atomic_file._write", write_once),
        ("get", errno.EIO, "readv", "archive.store.read_object", quarantining),
        ("forget", errno.EIO, "lstat", "archive.keyring.Keyring.destroy", keep_the_key),
    ],
)
def test_the_checks_see_what_is_wrong(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int, call: str, place: str,
    wrong: Callable[..., object],
) -> None:
    """An archive that does it wrong is told from ours when the same calls fail."""
    template = prepared(quick_path / "template", operation, encrypted=call == "lstat")
    monkeypatch.setattr(f"models_integration.{place}", wrong)
    calls = template.copied(quick_path / "counted").attempt(0, number)[1]
    with pytest.raises(AssertionError):
        for at in [at for at, name in enumerate(calls, 1) if name == call]:
            case = template.copied(quick_path / str(at))
            case.check(case.attempt(at, number)[0])
