"""The archive after a loss of power, on a disk that drops and reorders whatever was not synced.

`--kvspec-profile nightly` loses the power forty times after each call, otherwise three times after some.
"""

import shutil
from pathlib import Path
from random import Random

import pytest

from conformance.assurance.power_loss import Disk, recording
from conformance.own.models_integration.archive.chunks import chunk
from conformance.own.models_integration.archive.fault_cases import MADE, OPERATIONS, Case
from conformance.plugin import profile_of
from models_integration.archive.errors import ArchiveError
from models_integration.archive.store import Archive
from models_integration.cache.atomic_file import publish

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

SHARES: tuple[float, ...] = (0.0, 1.0, 0.5)
"""Of what was not synced, what is there all the same: nothing, all, any half."""
SAMPLE = 12
"""Calls after which the power is lost, where the profile is not nightly."""

for_both = pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])


def prepared(folder: Path, operation: str, encrypted: bool) -> Case:
    if encrypted:
        pytest.importorskip("cryptography")
    case = Case(folder, operation, encrypted)
    case.prepare()
    return case


def recorded(case: Case, dropped: int = 0) -> tuple[list[Disk], int]:
    """The disk after each call of the operation, and how many syncs it made."""
    with recording(case.folder, dropped) as (made, states), case.open() as archive:
        OPERATIONS[case.operation](archive, case.keys)
    return states, made.syncs


def check_crash(case: Case, disk: Disk, rng: Random, share: float, promised: bool) -> None:
    left = Case(case.folder.parent / "left", case.operation, case.encrypted, case.keys, case.salts)
    disk.crash(left.folder, rng, share)
    try:
        if promised and case.operation == "forget":
            left.assert_gone(disk.raw())
            assert len(list((left.folder / "keys").glob("*"))) == case.encrypted  # his salt
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
        chosen = [*rng.sample(states, min(SAMPLE, len(states))), states[-1]]
    for disk in chosen:
        for share in shares:
            check_crash(case, disk, rng, share, promised=disk is states[-1])


@pytest.mark.law("the-proof-has-teeth")
@for_both
@pytest.mark.parametrize("operation", ["put", "forget"])
def test_without_any_one_sync_something_is_lost_or_left(quick_path: Path, operation: str, encrypted: bool) -> None:
    """A put loses the chunk or its salt, and a forgotten chunk's bytes or name are left."""
    case = prepared(quick_path / "archive", operation, encrypted)
    for path in case.folder.rglob(".tmp-*"):
        path.unlink()  # bytes of nobody
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
    # The third sync of a new salt is of the name `keys`, which was durable before.
    assert (syncs, unnoticed) == ({"put": 3, "forget": 4}[operation] + 2 * encrypted + new_salt, [3] * new_salt)


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("dropped", range(8))
def test_the_first_put_of_a_new_archive_is_durable(quick_path: Path, dropped: int, begun: bool) -> None:
    """Its folders, too, also those of a process that was killed. Without any one of the syncs, the chunk may be lost.
    """
    (root := quick_path / "root").mkdir()
    with recording(root, dropped, each=False) as (made, states):
        if begun:
            (root / "new" / "nested" / "archive" / "objects").mkdir(parents=True)
        with Archive(root / "new" / "nested" / "archive") as archive:
            key = archive.put(*chunk(1))
    states[-1].crash(quick_path / "left", Random(1), 0.0)
    with Archive(quick_path / "left" / "new" / "nested" / "archive") as archive:
        assert (archive.get(key, "alice") is not None) == (dropped == 0)
    assert made.syncs == 7


@pytest.mark.parametrize("dropped", [2, 3], ids=["the salt", "the folder"])
def test_a_salt_that_was_there_is_durable_by_then(quick_path: Path, dropped: int) -> None:
    """Whoever made the salt or its folder was stopped before the name was synced; a put relies on it all the same."""
    case = prepared(quick_path / "archive", "put", encrypted=True)
    for salt in (case.folder / "keys").iterdir():
        salt.unlink()
    (case.folder / "keys").rmdir()
    with recording(case.folder, dropped) as (_, states), case.open() as archive:
        archive._objects.cipher("carol-the-tenant", create=True)
        OPERATIONS["put"](archive, case.keys)
    states[-1].crash(quick_path / "left", Random(1), 0.0)
    with Case(quick_path / "left", "put", encrypted=True).open() as archive:
        assert archive.verify().read == 1  # the others' salts are gone


@pytest.mark.parametrize("above", [False, True])
def test_a_file_in_new_folders_is_durable(quick_path: Path, above: bool) -> None:
    """Each of the folders, whether one of them was there."""
    (root := quick_path / "root").mkdir()
    if above:
        (root / "a").mkdir()
    with recording(root, each=False) as (_, states):
        publish(root / "a" / "b" / "c" / "file", [memoryview(b"whole")])
    states[-1].crash(quick_path / "left", Random(1), 0.0)
    assert (quick_path / "left" / "a" / "b" / "c" / "file").read_bytes() == b"whole"


def test_a_chunk_that_is_put_again_is_durable_by_then(quick_path: Path) -> None:
    """Whoever wrote the object was stopped before the name was synced; the second put promises the chunk all the same.
    """
    case = prepared(quick_path / "archive", "put", encrypted=False)
    with recording(case.folder, dropped=3) as (_, states), case.open() as archive:
        for _ in range(2):
            OPERATIONS["put"](archive, case.keys)
    check_crash(case, states[-1], Random(1), 0.0, promised=True)


@pytest.mark.parametrize(("operation", "dropped"), [("put", 0), ("get", 0), ("get", 2)], ids=["put", "get", "stopped"])
def test_of_a_forgotten_object_that_was_replaced_nothing_is_left(
    quick_path: Path, operation: str, dropped: int,
) -> None:
    """Neither the bytes of a damaged one that a put replaced, nor the name of one that a reader put away.

    One of the readers was stopped before it had synced that the name is gone.
    """
    case = prepared(quick_path / "archive", "forget", encrypted=False)
    for path in case.folder.rglob(".tmp-*"):
        path.unlink()  # erasing them syncs the same folder
    manifest, tensors = MADE["hers, damaged"]
    with recording(case.folder, dropped) as (_, states), case.open() as archive:
        if operation == "put":
            archive.put(manifest, tensors)
        else:
            assert archive.get(manifest.key, manifest.tenant) is None
        archive.forget(manifest.tenant)
    check_crash(case, states[-1], Random(1), 0.0, promised=True)
