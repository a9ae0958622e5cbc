"""An archive compared with a dict of its possible contents: put, read, verify, forget and faults in any order.

An interrupted operation adds possible states. Each observation removes some, and at least one must remain.
"""

import errno
import json
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lab.faults import FAULTS, WELL, Fault, Killed
from lab.mutants.edits import Edit, replaced
from models_integration.archive.errors import ArchiveError, KeyUnavailable
from models_integration.archive.keyring import Keyring
from models_integration.archive.objects import FORMAT
from models_integration.archive.store import Archive
from models_integration.cache.tensor_file import write
from spec import SPEC_VERSION
from tests.models_integration.archive.conftest import MEMORY
from tests.models_integration.archive.fault_cases import MASTER, blobs, chunk, path_of

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")

TENANTS = ("alice-the-tenant", "bob-the-tenant")
OBJECT_BYTES = {False: 4000, True: 8300}
"""Lower bound of the bytes of a chunk, without and with encryption."""
THERE, DAMAGED, GONE, HALF = "there", "damaged", "gone", "half forgotten"
"""HALF: the key of the tenant was destroyed, but the file was not."""
tenants, texts, stores = st.sampled_from(TENANTS), st.integers(0, 1), st.integers(0, 1)
may_encrypt = st.booleans() if find_spec("cryptography") else st.just(False)


class ArchiveMachine(RuleBasedStateMachine):
    """Two stores of one folder, like those of two processes.

    Rules name a chunk by tenant and text, because keys of encrypted chunks differ between runs.
    """

    @initialize(encrypted=may_encrypt, space=st.none() | st.integers(2, 3))
    def open(self, encrypted: bool, space: int | None) -> None:
        """Create a folder with a chunk of each tenant. `room` is the number of chunks within the limit."""
        self.place = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.folder, self.encrypted = Path(self.place.name) / "archive", encrypted
        self.limit = None if space is None else space * OBJECT_BYTES[encrypted]
        self.may: dict[str, set[str]] = {}
        self.texts: dict[str, tuple[str, int]] = {}
        self.tried: set[tuple[str, int]] = set()
        self.stores = [self.opened(), self.opened()]
        for tenant in TENANTS:
            self.put(0, tenant, 0, WELL)

    def opened(self, master: bytes | None = MASTER) -> Archive:
        ring = Keyring(self.folder / "keys", master) if self.encrypted and master is not None else None
        return Archive(self.folder, ring, self.limit)

    @contextmanager
    def interrupted(self, store: int, fault: Fault, *kinds: str) -> Iterator[list[str]]:
        """Run an operation during a fault. Only these kinds of faults may interrupt it.

        Yields:
            A list that then contains how the operation was interrupted.
        """
        how: list[str] = []
        try:
            with fault.happening():
                yield how
        except (ArchiveError, OSError, Killed) as error:
            if fault.kind not in (*kinds, "killed"):
                raise AssertionError(f"{fault} must not stop the operation") from error
            how.append(fault.kind)
            note(f"interrupted by a fault of kind {fault.kind}")
        if fault.kind == "killed":
            self.stores[store] = self.opened()

    def widen(self, *states: str, only: Callable[[str], bool] = lambda key: True) -> None:
        for key in filter(only, self.may):
            self.may[key] |= {*states}

    def narrow(self, key: str, seen: str, *states: str) -> None:
        left = self.may[key] & {*states}
        assert left, f"a chunk {seen}, and must be {' or '.join(sorted(self.may[key]))}"
        self.may[key] = left

    # Rules for operations.

    @rule(store=stores, tenant=tenants, text=texts, fault=FAULTS)
    def put(self, store: int, tenant: str, text: int, fault: Fault) -> None:
        """Put a chunk. When `put` returns a key, the chunk is stored."""
        key, before = "", [key for key, stored in self.texts.items() if stored == (tenant, text)]
        over = any(DAMAGED in self.may[key] for key in before)
        with self.interrupted(store, fault, "full", "error") as how:
            key = self.stores[store].put(*chunk(text, tenant=tenant))
        if self.limit is not None:
            self.widen(GONE, only=lambda other: other != key)
        if how:
            self.tried.add((tenant, text))
            self.widen(THERE, only=lambda other: other in before)
        else:
            self.texts[key], self.may[key] = (tenant, text), {THERE}
            note("put over a damaged chunk" if over else "put")
            self.look(key)
        self.list_all()

    def key(self, tenant: str, text: int) -> str | None:
        """Return the newest key of a text."""
        return next((key for key in reversed(self.texts) if self.texts[key] == (tenant, text)), None)

    @rule(store=stores, tenant=tenants, text=texts, fault=FAULTS)
    def get(self, store: int, tenant: str, text: int, fault: Fault) -> None:
        """Read a chunk. The result is the text's chunk, or a miss if a miss is possible.

        Damaged chunks are quarantined.
        """
        if (key := self.key(tenant, text)) is None:
            return
        with self.interrupted(store, fault, "error"):
            self.look(key, store, puts_away=fault.kind in ("well", "full"))
        if fault.kind in ("error", "killed"):
            self.widen(GONE, only=lambda other: other == key and DAMAGED in self.may[key])
        self.list_all()

    def look(self, key: str, store: int = 0, puts_away: bool = True) -> None:
        tenant, text = self.texts[key]
        actual = self.stores[store].get(key, tenant)
        if actual is None:
            note("a miss" + " of a damaged chunk" * (DAMAGED in self.may[key]))
            self.narrow(key, "is a miss", DAMAGED, GONE, HALF)
            if DAMAGED in self.may[key]:
                self.may[key] = self.may[key] - {DAMAGED} | {GONE} if puts_away else self.may[key] | {GONE}
            return
        self.narrow(key, "was read", THERE)
        manifest, tensors = chunk(text, tenant=tenant)
        assert all(torch.equal(actual.tensors[name], tensors[name]) for name in tensors)
        assert (actual.manifest.tenant, actual.manifest.ids) == (tenant, manifest.ids)

    @rule(store=stores)
    def get_all(self, store: int) -> None:
        """Check that each chunk that was ever put is stored or missing, as expected."""
        for key in self.may:
            self.look(key, store)
        self.list_all()

    @rule(store=stores, tenant=tenants, text=texts)
    def ask_as_another_tenant(self, store: int, tenant: str, text: int) -> None:
        """Read a chunk as a different tenant. `get` returns None, and nothing changes."""
        if key := self.key(tenant, text):
            before, (other,) = blobs(self.folder), {*TENANTS} - {tenant}
            assert self.stores[store].get(key, other) is None
            assert key not in {entry.key for entry in self.stores[store].entries(other)}
            assert blobs(self.folder) == before

    @rule(tenant=tenants, text=texts, master=st.sampled_from([None, bytes(range(1, 33))]))
    def ask_without_the_key(self, tenant: str, text: int, master: bytes | None) -> None:
        """Use the archive without the key. Nothing is read, put or forgotten, and nothing changes."""
        key = self.key(tenant, text)
        if key is None or not self.encrypted or self.may[key] != {THERE}:
            return
        before, other = blobs(self.folder), self.opened(master)
        for act in (
            lambda: other.get(key, tenant), lambda: other.put(*chunk(text, tenant=tenant)), lambda: other.forget(tenant)
        ):
            with pytest.raises(KeyUnavailable):
                act()
        assert blobs(self.folder) == before

    @rule(tenant=tenants, text=texts, how=st.sampled_from(["flip", "cut", "other", "crafted"]), at=st.integers(0, 99))
    def damage(self, tenant: str, text: int, how: str, at: int) -> None:
        """Damage a file: flip or cut bytes at so many hundredths, or replace it by a different or a crafted object."""
        key = self.key(tenant, text)
        if key is None or not path_of(self.folder, key).exists() or HALF in self.may[key]:
            return
        path = path_of(self.folder, key)
        data = bytearray(path.read_bytes())
        others = [other for other in self.may if other != key and self.may[other] == {THERE}]
        if how == "crafted" and not self.encrypted:
            manifest = json.dumps([[], None, {"tokens": 1e30}][at % 3])
            write(path, {"format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest}, {"0.k": torch.zeros(2, 3, 4)})
        elif how == "other" and others:
            path.write_bytes(path_of(self.folder, others[0]).read_bytes())
        elif how == "cut":
            path.write_bytes(data[: at * len(data) // 100])
        elif data:
            data[at * len(data) // 100] ^= 1 << at % 8
            path.write_bytes(data)
        self.may[key] = {DAMAGED}
        self.list_all()

    @rule(store=stores, fault=FAULTS)
    def verify(self, store: int, fault: Fault) -> None:
        """Verify the archive. Intact chunks are read. Damaged chunks are reported and quarantined."""
        with self.interrupted(store, fault, "error") as how:
            report = self.stores[store].verify()
        if how:
            self.widen(GONE, only=lambda key: DAMAGED in self.may[key])
            return
        named = {*report.quarantined}
        assert all(DAMAGED in self.may[key] for key in named), "an undamaged chunk is reported as damaged"
        assert (report.foreign, report.clear) == ([], [])
        for key in named:
            self.may[key] = {GONE} if fault.kind in ("well", "full") else {DAMAGED, GONE}
        if fault.kind in ("well", "full", "short"):
            for key in self.may.keys() - named:
                self.narrow(key, "is not called damaged", THERE, GONE, HALF)
            assert report.read >= sum(may == {THERE} for may in self.may.values())
        note("verified" + " beside a damaged chunk" * bool(named))
        self.list_all()

    @rule(store=stores, tenant=tenants, fault=FAULTS)
    def forget(self, store: int, tenant: str, fault: Fault) -> None:
        """Forget a tenant. No text of the tenant remains in any file, even on a full disk."""
        keys = {key for key in self.may if self.texts[key][0] == tenant}
        with self.interrupted(store, fault, "error") as how:
            self.stores[store].forget(tenant)
        # The file of a different tenant may contain the bytes of this tenant.
        self.widen(GONE, only=lambda key: DAMAGED in self.may[key])
        if how:
            self.widen(*[GONE, HALF][: 1 + self.encrypted], only=keys.__contains__)
        else:
            self.may |= {key: {GONE} for key in keys}
            self.tried = {tried for tried in self.tried if tried[0] != tenant}
            actual = b"".join(blobs(self.folder))
            assert not [word for word in (tenant, *keys) if word.encode() in actual], "a forgotten word is in a file"
            note("a tenant is forgotten")
        self.list_all()

    @rule(store=stores, fault=FAULTS)
    def gc(self, store: int, fault: Fault) -> None:
        """Collect garbage. Chunks beyond the limit are removed."""
        with self.interrupted(store, fault, "error") as how:
            self.stores[store].gc()
        if self.limit is not None:
            self.widen(GONE)
            total = sum(entry.bytes for entry in self.stores[store].entries())
            assert how or total <= self.limit
        self.list_all()

    @rule(store=stores, fault=FAULTS)
    def reopen(self, store: int, fault: Fault) -> None:
        """Open a store again. The old store was never closed."""
        with self.interrupted(store, fault, "error"):
            self.stores[store] = self.opened()
        self.list_all()

    # Checks.

    def list_all(self) -> None:
        """Check that each listed chunk may exist, is listed once, and belongs to its tenant."""
        entries = self.stores[0].entries()
        listed = {entry.key: entry for entry in entries}
        assert len(listed) == len(entries), "a chunk is listed twice"
        for key in listed.keys() - self.texts.keys():
            self.adopt(key)
        for key in self.may:
            if key in listed:
                assert listed[key].tenant in (None, self.texts[key][0]), "a chunk is listed for the wrong tenant"
                self.narrow(key, "is listed", THERE, DAMAGED, HALF)
            else:
                self.narrow(key, "is not listed", GONE, DAMAGED, HALF)

    def adopt(self, key: str) -> None:
        """Add a chunk that an interrupted put has published."""
        stored_texts = [text for text in self.tried if self.stores[0].get(key, text[0]) is not None]
        assert stored_texts, "a listed chunk was never put, or cannot be read"
        ids = {tenant: self.stores[0].get(key, tenant).manifest.ids for tenant, _ in stored_texts}  # type: ignore[union-attr]
        (self.texts[key],) = [text for text in stored_texts if chunk(text[1])[0].ids == ids[text[0]]]
        self.may[key] = {THERE}
        note("an interrupted put has published its chunk")

    def teardown(self) -> None:
        self.place.cleanup()


def note(state: str) -> None:
    """Add a state to the statistics of Hypothesis."""
    if currently_in_test_context():
        event(state)


_profile = settings.default or settings()
TestArchive = ArchiveMachine.TestCase
TestArchive.settings = settings(
    _profile, max_examples=max(30, _profile.max_examples // 5), stateful_step_count=12,
    suppress_health_check=[HealthCheck.too_slow],
)


ROWS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
MUTANTS, PROGRAMS = ROWS["mutants"], ROWS["programs"]
WORDS = {"ALICE": TENANTS[0], "BOB": TENANTS[1], "WELL": WELL, "EROFS": errno.EROFS}
UNGUIDED = settings(max_examples=2000, stateful_step_count=15, phases=[Phase.generate], database=None, deadline=None)


class Words(dict[Any, Any]):
    """Meanings of the words of a row. Any other word means itself."""

    def __missing__(self, word: Any) -> Any:
        return word


def run(program: dict[str, Any], encrypted: bool = False) -> None:
    """Run the steps of a program on a new archive that has chunk 0 of each tenant."""
    machine = ArchiveMachine()
    try:
        machine.open(encrypted, None)
        for call in range(*program.get("calls", [1])):
            words = Words({**WORDS, "CALL": call})
            for name, *given in program["steps"]:
                getattr(machine, name)(*(
                    Fault(*map(words.__getitem__, x)) if isinstance(x, list) else words[x] for x in given
                ))
        machine.get_all(0)
    finally:
        machine.teardown()


def mistake(row: dict[str, str]) -> AbstractContextManager[None]:
    """Apply a planted error to this process."""
    return replaced(Edit(row["of"], body=row["body"]))


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    run(MUTANTS[name])
    with mistake(MUTANTS[name]), pytest.raises((AssertionError, ArchiveError)):
        run(MUTANTS[name])


@pytest.mark.nightly
@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", MUTANTS)
def test_random_programs_find_it(name: str) -> None:
    with mistake(MUTANTS[name]), pytest.raises((AssertionError, ArchiveError)):
        run_state_machine_as_test(ArchiveMachine, settings=UNGUIDED)


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_once_failed_holds(name: str, encrypted: bool) -> None:
    if encrypted:
        pytest.importorskip("cryptography")
    run(PROGRAMS[name], encrypted)
