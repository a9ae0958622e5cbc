"""The archive's machine has teeth: of each of these mistakes, each once in the code, a short program finds it."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.assurance.faults import WELL, Fault
from conformance.own.models_integration.archive.test_archive_machine import TENANTS, ArchiveMachine
from models_integration.archive import store
from models_integration.archive.errors import ArchiveError, named_errors
from models_integration.archive.object_folder import ObjectFolder
from models_integration.archive.objects import read_claim, stated_owner
from models_integration.archive.store import Archive, Entry, Report
from models_integration.cache import atomic_file
from models_integration.cache.tensor_file import Damaged

Patch = pytest.MonkeyPatch
Program = Callable[[ArchiveMachine], None]
ALICE, BOB = TENANTS
UNGUIDED = settings(max_examples=2000, stateful_step_count=15, phases=[Phase.generate], database=None, deadline=None)


def run(program: Program, encrypted: bool = False) -> None:
    """A program on a new archive that holds chunk 0 of each tenant."""
    machine = ArchiveMachine()
    try:
        machine.open(encrypted, None)
        program(machine)
        machine.get_all(0)
    finally:
        machine.teardown()


def phantom_rows(patch: Patch) -> None:
    """An object is listed as whatever it says it is."""

    def wrong(objects: Any, key: str) -> Entry | None:
        path = objects._files.path(key)
        with suppress(Damaged, FileNotFoundError):
            claim = read_claim(path)
            return Entry(claim.key, claim.tenant, claim.tokens, path.stat().st_size, claim.created)
        return None

    patch.setattr(store._ProvedObjects, "entry", wrong)


def put_over_damage(patch: Patch) -> None:
    """An object that is there is taken for whole."""
    patch.setattr(store._ProvedObjects, "is_whole", lambda objects, key, tenant: objects._files.path(key).exists())


def full_disk_forget(patch: Patch) -> None:
    """What is to go is written down before anything is erased."""
    forget = Archive.forget

    def wrong(archive: Archive, tenant: str) -> int:
        going = archive.folder / "going"
        with named_errors(going):
            going.write_text("\n".join(entry.key for entry in archive.entries(tenant)), encoding="ascii")
        gone = forget(archive, tenant)
        going.unlink()
        return gone

    patch.setattr(Archive, "forget", wrong)


def quarantine_kept(patch: Patch) -> None:
    """`forget` leaves the quarantined objects of a tenant."""
    everything = ObjectFolder.everything

    def wrong(files: ObjectFolder) -> list[Path]:
        return [path for path in everything(files) if path.parent != files._damaged]

    patch.setattr(ObjectFolder, "everything", wrong)


def bricked(patch: Patch) -> None:
    """An object whose manifest is none of ours is an error of the whole check."""
    judge = Archive._judge

    def wrong(archive: Archive, key: str, report: Report) -> None:
        with suppress(Damaged, OSError):
            stated_owner(archive._files.path(key))
            return judge(archive, key, report)
        raise ArchiveError(f"{key} cannot be read")

    patch.setattr(Archive, "_judge", wrong)


def short_write(patch: Patch) -> None:
    """One call is taken to write all that it is given."""
    patch.setattr(atomic_file, "_write_at", lambda descriptor, data, at: os.pwrite(descriptor, data, at))


def put_on_short_calls(machine: ArchiveMachine) -> None:
    for call in range(1, 13):
        machine.put(0, ALICE, 1, Fault("short", call))
        machine.forget(0, ALICE, WELL)


def put_again(machine: ArchiveMachine) -> None:
    machine.damage(ALICE, 0, "flip", 50)
    machine.put(0, ALICE, 0, WELL)


def forget_what_was_put_away(machine: ArchiveMachine) -> None:
    machine.damage(ALICE, 0, "flip", 50)
    machine.get(0, ALICE, 0, WELL)
    machine.forget(1, ALICE, WELL)


def verify_a_crafted_object(machine: ArchiveMachine) -> None:
    machine.damage(ALICE, 0, "crafted", 0)
    machine.verify(0, WELL)


MUTANTS: dict[Callable[[Patch], None], Program] = {
    phantom_rows: lambda machine: machine.damage(ALICE, 0, "other", 0),
    put_over_damage: put_again,
    full_disk_forget: lambda machine: machine.forget(0, ALICE, Fault("full", 0)),
    quarantine_kept: forget_what_was_put_away,
    bricked: verify_a_crafted_object,
    short_write: put_on_short_calls,
}


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_killed(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    run(MUTANTS[mutate])
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ArchiveError)):
        run(MUTANTS[mutate])


@pytest.mark.nightly
@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_random_programs_find_it(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ArchiveError)):
        run_state_machine_as_test(ArchiveMachine, settings=UNGUIDED)


def put_in_vain(machine: ArchiveMachine) -> None:
    """A failed put over a damaged chunk changes nothing: the chunk is damaged, and `verify` names it."""
    machine.damage(ALICE, 0, "flip", 98)
    machine.put(0, ALICE, 0, Fault("full", 0))
    machine.verify(0, WELL)


def fail_each_call(machine: ArchiveMachine) -> None:
    """A put that fails leaves the chunks of others."""
    for call in range(8, 20, 2):
        machine.put(0, ALICE, 1, Fault("error", call, errno.EROFS))
        machine.gc(0, WELL)


def forget_whose_bytes_are_elsewhere(machine: ArchiveMachine) -> None:
    """A damaged object of a different tenant has the bytes of the forgotten one, and is listed without a tenant."""
    machine.damage(ALICE, 0, "other", 0)
    machine.forget(0, BOB, WELL)
    machine.gc(0, WELL)


def kill_each_call(machine: ArchiveMachine) -> None:
    """What was promised is there; a second call of forget goes on."""
    for call in range(1, 40, 3):
        machine.put(0, ALICE, 1, Fault("killed", call))
        machine.get_all(1)
        machine.forget(0, ALICE, Fault("killed", call))
        machine.forget(1, ALICE, WELL)


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("program", [put_in_vain, fail_each_call, forget_whose_bytes_are_elsewhere, kill_each_call])
def test_what_once_failed_holds(program: Program, encrypted: bool) -> None:
    if encrypted:
        pytest.importorskip("cryptography")
    run(program, encrypted)
