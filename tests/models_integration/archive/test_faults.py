"""A fault at every system call of the archive, and a loss of power after every call."""

import ast
import errno
import fcntl
import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import getsource
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from conformance.plugin import profile_of
from lab.faults import CALLS, LAST, SHORT, Disk, faults, recording
from models_integration.archive import keyring, object_folder, objects, store
from models_integration.archive.errors import ArchiveError
from models_integration.archive.object_folder import ASIDE
from models_integration.archive.store import Archive, Report, Stored
from models_integration.cache import atomic_file, tensor_file
from models_integration.cache.atomic_file import TEMPORARY, publish
from tests.models_integration.archive.fault_cases import CHUNKS, OPERATIONS, Case, chunk, path_of
from tests.models_integration.archive.test_archive_machine import ROWS, mistake

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")


ERRORS = {**{errno.errorcode[number]: number for number in (errno.ENOSPC, errno.EIO, errno.EROFS)}, "short": SHORT}
SAMPLE = 3
"""Number of calls that are tested for each case outside the nightly profile."""
MODULES = (atomic_file, tensor_file, keyring, object_folder, objects, store)
WITHOUT_THE_SYSTEM = {"fspath", "strerror", "getpid"}

for_both = pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
for_each = pytest.mark.parametrize("operation", OPERATIONS)


@pytest.fixture(autouse=True)
def salts_from_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the salts. The number of syncs of a put depends on whether its folder, one of 256, already has a chunk."""
    monkeypatch.setattr(os, "urandom", Random(1).randbytes)


def prepared(folder: Path, operation: str, encrypted: bool) -> Case:
    case = Case(folder, operation, encrypted)
    case.prepare()
    return case


def chosen(template: Case, number: int, config: pytest.Config) -> Iterator[tuple[int, Case]]:
    """Yield numbers of calls, of as many kinds as possible, each with a copy of the archive."""
    calls = template.copied(template.folder.parent / "counted").attempt(0, number)[1]
    every = list(range(1, len(calls) + 1))
    if profile_of(config) != "nightly":
        rng = random.Random(f"{template.operation} {number} {template.encrypted}")
        rng.shuffle(every)
        one_of_each = {calls[at - 1]: at for at in every}
        every = rng.sample(list(one_of_each.values()), min(SAMPLE, len(one_of_each)))
    for at in every:
        case = template.copied(template.folder.parent / str(at))
        yield at, case
        shutil.rmtree(case.folder)


@pytest.mark.parametrize(("operation", "number", "encrypted"), [
    pytest.param(operation, number, encrypted, marks=[pytest.mark.nightly] * ((at + to + encrypted) % 2))
    for at, operation in enumerate(OPERATIONS) for to, number in enumerate(ERRORS.values())
    for encrypted in (False, True)
])
@pytest.mark.usefixtures("without_collector")
def test_no_failing_call_makes_the_archive_unusable(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, number: int, encrypted: bool,
) -> None:
    template = prepared(quick_path / "template", operation, encrypted)
    for at, case in chosen(template, number, pytestconfig):
        before = descriptors()
        done, _ = case.attempt(at, number)
        assert descriptors() == before
        case.check(done)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Disable garbage collection. Objects of earlier tests would be closed during an attempt."""
    gc.disable()
    yield
    gc.enable()


def descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    listed = Path("/proc/self/fd")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


@for_both
@for_each
def test_no_kill_makes_the_archive_unusable(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, encrypted: bool,
) -> None:
    template = prepared(quick_path / "template", operation, encrypted)
    for at, case in chosen(template, errno.EIO, pytestconfig):
        case.check(case.attempt(at, LAST)[0], killed=True)


def get_hers(archive: Archive, key: str) -> Stored | None:
    return archive.get(key, "alice")


def verified(archive: Archive, key: str) -> Report:
    return archive.verify()


@pytest.mark.parametrize("number", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("work", [get_hers, verified])
def test_a_chunk_that_was_set_aside_is_there_or_the_failure_is_named(
    quick_path: Path, number: int, work: Callable[[Archive, str], Stored | Report | None],
) -> None:
    """Check a chunk that a killed reader of a different process had moved from its place. Then each call fails once."""
    with Archive(quick_path) as archive:
        path = path_of(quick_path, key := archive.put(*chunk(1)))
        for shard in {*path.parent.parent.iterdir()} - {path.parent}:
            shard.rmdir()
        at, failed = 0, True
        while failed:
            at += 1
            path.rename(path.with_name(f"{TEMPORARY}{path.name}-{at:08x}{ASIDE}"))
            with faults(at, number) as injected, suppress(ArchiveError, OSError):
                actual = work(archive, key)
                assert actual is not None, injected.calls
                assert not isinstance(actual, Report) or actual.clean <= (actual.read == 1), injected.calls
            assert archive.get(key, "alice") is not None
            failed = len(injected.calls) >= at
        assert at > 3


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_call_of_the_archive_can_fail(module: ModuleType) -> None:
    """Check that the archive calls only those functions of `os` and `fcntl` that the faults cover."""
    modules: dict[str, ModuleType] = {"os": os, "fcntl": fcntl}
    for node in ast.walk(ast.parse(getsource(module))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            library = modules[node.value.id]
            if callable(getattr(library, node.attr, None)):
                assert node.attr in {*CALLS[library], *WITHOUT_THE_SYSTEM}, f"{node.value.id}.{node.attr}"


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(("operation", "number"), [("put", SHORT), ("get", errno.EIO), ("forget", errno.EIO)])
def test_the_checks_see_what_is_wrong(quick_path: Path, operation: str, number: int) -> None:
    """Plant an error in the archive, and check that the tests of failing calls detect this error."""
    row = ROWS["faults"][operation]
    template = prepared(quick_path / "template", operation, encrypted=operation == "forget")
    with mistake(row):
        calls = template.copied(quick_path / "counted").attempt(0, number)[1]
        with pytest.raises(AssertionError):
            for at in [at for at, name in enumerate(calls, 1) if name == row["call"]]:
                case = template.copied(quick_path / str(at))
                case.check(case.attempt(at, number)[0])


SHARES: tuple[float, ...] = (0.0, 1.0, 0.5)
"""Fraction of the unsynced data that survives a crash: nothing, all, or a random half."""
CRASHES = 12
"""Number of calls after which the power is lost, outside the nightly profile."""


def recorded(case: Case, dropped: int = 0) -> tuple[list[Disk], int]:
    """Return the disk after each call of the operation, and the number of syncs."""
    with recording(case.folder, dropped) as (calls, states), case.open() as archive:
        OPERATIONS[case.operation](archive, case.keys)
    return states, calls.syncs


def check_crash(case: Case, disk: Disk, rng: Random, share: float, promised: bool) -> None:
    left = Case(case.folder.parent / "left", case.operation, case.encrypted, case.keys, case.salts)
    disk.crash(left.folder, rng, share)
    try:
        if promised and case.operation == "forget":
            left.assert_gone(disk.raw())
            assert len(list((left.folder / "keys").glob("*"))) == case.encrypted  # Only his salt is left.
        left.check(promised, killed=True)
    finally:
        shutil.rmtree(left.folder)


@for_both
@pytest.mark.parametrize("operation", ["put", "get", "forget", "gc"])
def test_what_was_promised_before_a_loss_of_power_holds(
    quick_path: Path, pytestconfig: pytest.Config, operation: str, encrypted: bool,
) -> None:
    case = prepared(quick_path / "archive", operation, encrypted)
    states, _ = recorded(case)
    rng, shares, chosen = Random(f"{operation} {encrypted}"), SHARES, states
    if profile_of(pytestconfig) == "nightly":
        shares += (0.5,) * 37
    else:
        chosen = [*rng.sample(states, min(CRASHES, len(states))), states[-1]]
    for disk in chosen:
        for share in shares:
            check_crash(case, disk, rng, share, promised=disk is states[-1])


@pytest.mark.law("the-proof-has-teeth")
@for_both
@pytest.mark.parametrize("operation", ["put", "forget"])
def test_without_any_one_sync_something_is_lost_or_left(quick_path: Path, operation: str, encrypted: bool) -> None:
    """Check that without a sync, a put loses the chunk or its salt, and a forgotten chunk leaves bytes or a name."""
    case = prepared(quick_path / "archive", operation, encrypted)
    for path in case.folder.rglob(".tmp-*"):
        path.unlink()  # These are bytes that no entry names.
    _, syncs = recorded(case.copied(quick_path / "counted"))
    rng, unnoticed = Random(1), []
    for dropped in range(1, syncs + 1):
        states, _ = recorded(copied := case.copied(quick_path / "dropped"), dropped)
        try:
            for share in SHARES:
                check_crash(copied, states[-1], rng, share, promised=True)
        except (AssertionError, ArchiveError):
            pass
        else:
            unnoticed.append(dropped)
        shutil.rmtree(copied.folder)
    new_salt = encrypted and operation == "put"
    # The third sync of a new salt covers the name `keys`, which was already durable.
    assert (syncs, unnoticed) == ({"put": 3, "forget": 4}[operation] + 2 * encrypted + new_salt, [3] * new_salt)


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("dropped", range(8))
def test_the_first_put_of_a_new_archive_is_durable(quick_path: Path, dropped: int, begun: bool) -> None:
    """Check folders that a killed process created, too. Without any one of the syncs, the chunk may be lost."""
    (root := quick_path / "root").mkdir()
    with recording(root, dropped, each=False) as (calls, states):
        if begun:
            (root / "new" / "nested" / "archive" / "objects").mkdir(parents=True)
        with Archive(root / "new" / "nested" / "archive") as archive:
            key = archive.put(*chunk(1))
    states[-1].crash(quick_path / "left", Random(1), 0.0)
    with Archive(quick_path / "left" / "new" / "nested" / "archive") as archive:
        assert (archive.get(key, "alice") is not None) == (dropped == 0)
    assert calls.syncs == 7


@pytest.mark.parametrize("dropped", [2, 3], ids=["the salt", "the folder"])
def test_a_salt_that_was_there_is_durable_by_then(quick_path: Path, dropped: int) -> None:
    """Check a salt or folder of a process that was stopped before it synced the name. A put relies on the salt."""
    case = prepared(quick_path / "archive", "put", encrypted=True)
    for salt in (case.folder / "keys").iterdir():
        salt.unlink()
    (case.folder / "keys").rmdir()
    with recording(case.folder, dropped) as (_, states), case.open() as archive:
        archive._objects.cipher("carol-the-tenant", create=True)
        OPERATIONS["put"](archive, case.keys)
    states[-1].crash(quick_path / "left", Random(1), 0.0)
    with Case(quick_path / "left", "put", encrypted=True).open() as archive:
        assert archive.verify().read == 1  # The salts of the remaining tenants are lost.


@pytest.mark.parametrize("above", [False, True])
def test_a_file_in_new_folders_is_durable(quick_path: Path, above: bool) -> None:
    """Check that folders survive a crash, if all are new and if the upper folder existed before."""
    (root := quick_path / "root").mkdir()
    if above:
        (root / "a").mkdir()
    with recording(root, each=False) as (_, states):
        publish(root / "a" / "b" / "c" / "file", [memoryview(b"whole")])
    states[-1].crash(quick_path / "left", Random(1), 0.0)
    assert (quick_path / "left" / "a" / "b" / "c" / "file").read_bytes() == b"whole"


def test_a_chunk_that_is_put_again_is_durable_by_then(quick_path: Path) -> None:
    """Check an object whose writer was stopped before it synced the name. The second put promises the chunk."""
    case = prepared(quick_path / "archive", "put", encrypted=False)
    with recording(case.folder, dropped=3) as (_, states), case.open() as archive:
        for _ in range(2):
            OPERATIONS["put"](archive, case.keys)
    check_crash(case, states[-1], Random(1), 0.0, promised=True)


@pytest.mark.parametrize(("operation", "dropped"), [("put", 0), ("get", 0), ("get", 2)], ids=["put", "get", "stopped"])
def test_of_a_forgotten_object_that_was_replaced_nothing_is_left(
    quick_path: Path, operation: str, dropped: int,
) -> None:
    """Check the bytes that a put replaced, and the name that a reader moved, also if its removal was not synced."""
    case = prepared(quick_path / "archive", "forget", encrypted=False)
    for path in case.folder.rglob(".tmp-*"):
        path.unlink()  # Erasing these files syncs the same folder.
    manifest, tensors = CHUNKS["hers, damaged"]
    with recording(case.folder, dropped) as (_, states), case.open() as archive:
        if operation == "put":
            archive.put(manifest, tensors)
        else:
            assert archive.get(manifest.key, manifest.tenant) is None
        archive.forget(manifest.tenant)
    check_crash(case, states[-1], Random(1), 0.0, promised=True)
