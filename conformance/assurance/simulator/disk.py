"""The world of an archive: its folder on a disk that fails, and what must be in it."""

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from conformance.assurance.faults import SHORT, faults
from conformance.assurance.simulator.oracle import VOCABULARY
from conformance.assurance.simulator.states import Met, must
from models_integration.archive.errors import ArchiveError
from models_integration.archive.library import Library
from models_integration.archive.objects import FORMAT
from models_integration.archive.store import Archive
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.tensor_file import write
from models_integration.model.identity import ModelIdentity
from reference.injection.wrappers import Vocabulary
from spec import SPEC_VERSION

__all__ = ["Disk", "Shelf", "told"]

TENANTS = ("alice-the-tenant", "bob-the-tenant")
OBJECT_BYTES = 5000
"""About what a chunk takes."""
THERE, DAMAGED, GONE, UNSURE = "there", "damaged", "gone", "unsure"


def told(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {error}"


class Disk:
    """A fault of an operation, or none: `full` with so many bytes for a file, a call that errs, one that does half."""

    def __init__(self, fault: Sequence[Any] | None) -> None:
        self.kind: str | None = None
        if fault is not None:
            self.kind, *self._numbers = fault
        self.calls = 0

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Inside, the disk fails."""
        if self.kind is None:
            yield
        elif self.kind == "full":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._numbers[0], before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        else:
            number, at = (SHORT, self._numbers[0]) if self.kind == "short" else self._numbers
            with faults(at, number) as made:
                yield
                self.calls = len(made.calls)

    @property
    def may_fail(self) -> bool:
        """Whether what stands in the way of the operation may make it fail."""
        return self.kind in ("full", "error")


class Shelf:
    """An archive of two tenants, and the texts that each must find in it."""

    def __init__(self, folder: Path, model: PreTrainedModel, identity: ModelIdentity, met: Met) -> None:
        self._folder, self._model, self._identity, self._met = folder, model, identity, met
        self._limit: int | None = None
        self._archive: Archive | None = None
        self._libraries: list[Library] = []
        self._keys: dict[str, tuple[int, int]] = {}
        """Tenant and text of each key that was ever given."""
        self._state: dict[str, str] = {}
        self._tried: set[tuple[int, int]] = set()
        """What a failed put may have published all the same."""
        self._away: set[int] = set()
        """Tenants of whom something was put away."""

    def limit(self, room: int | None) -> None:
        """Chunks that the archive holds."""
        self._limit = None if room is None else room * OBJECT_BYTES

    @staticmethod
    def text(number: int) -> list[int]:
        """The ids of a text."""
        generator = torch.Generator().manual_seed(1000 + number)
        return torch.randint(3, VOCABULARY, (8 + 3 * number,), generator=generator).tolist()

    def stored(self, tenant: int, text: int) -> str | None:
        """The key of a chunk that is there."""
        found = self._key(tenant, text)
        return found if found is not None and self._state[found] == THERE else None

    def inject(self, tenant: int, cache: RetainedCache, keys: Sequence[str | None]) -> None:
        """Splice stored chunks of a tenant into a session."""
        self._opened()
        self._libraries[tenant].inject(cache, [key for key in keys if key is not None])

    # Operations.

    def put(self, tenant: int, text: int, fault: Sequence[Any] | None) -> None:
        """A text is stored; when `put` has said so, it is there."""
        archive, disk, before = self._opened(), Disk(fault), self._key(tenant, text)
        state = None if before is None else self._state[before]
        try:
            with disk.failing():
                key = self._libraries[tenant].put(self.text(text))
        except (ArchiveError, OSError) as error:
            must(disk.may_fail, f"put: {told(error)}")
            self._met(f"a chunk is not put: {'the disk is full' if disk.kind == 'full' else 'a call fails'}")
            if before is None:
                self._tried.add((tenant, text))
            elif state != THERE:
                self._state[before] = UNSURE
            self._swept(archive, None)
        else:
            self._keys[key], self._state[key] = (tenant, text), THERE
            self._met({THERE: "a chunk is put again", DAMAGED: "a chunk is put over a damaged one"}.get(
                state or "", "a chunk is put"
            ))
            if disk.kind == "short":
                self._met("a chunk is put although a call did half")
            self._swept(archive, key)
            self._check(key)

    def get(self, which: int, fault: Sequence[Any] | None) -> None:
        """A chunk is looked up."""
        self._opened()
        if not self._keys:
            return
        key, disk = list(self._keys)[which % len(self._keys)], Disk(fault)
        try:
            with disk.failing():
                self._look_up(key)
        except (ArchiveError, OSError) as error:
            must(disk.may_fail, f"get: {told(error)}")
        self._check(key)

    def damage(self, which: int, how: str, at: float) -> None:
        """Bytes of an object change; or another object, or a crafted one, stands in its place."""
        self._opened()
        stored = [key for key in self._keys if self._path(key).exists() and self._path(key).stat().st_size]
        if not stored:
            return
        key = stored[which % len(stored)]
        path = self._path(key)
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[int(at * len(data))] ^= 1 << int(at * 1000) % 8
        elif how == "cut":
            data = data[: int(at * len(data))]
        elif how == "other":
            others = [other for other in stored if other != key and self._state[other] != DAMAGED]
            data = bytearray(self._path(others[0]).read_bytes() if others else b"")
        if how == "crafted":
            manifest = json.dumps([[], None, {"tokens": 1e30}][int(at * 3)])
            write(path, {"format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest}, {"0.k": torch.zeros(2, 3, 4)})
        else:
            path.write_bytes(data)
        self._state[key] = DAMAGED

    def reopen(self, fault: Sequence[Any] | None) -> None:
        """The archive is opened anew."""
        self._archive, disk = None, Disk(fault)
        try:
            with disk.failing():
                self._open()
        except (ArchiveError, OSError) as error:
            must(disk.kind == "error", f"opening: {told(error)}")
            self._met("the archive does not open: a call fails")
            self._open()
        else:
            if disk.kind == "full":
                self._met("the archive opens on a full disk")
        self._check_list()

    def verify(self, fault: Sequence[Any] | None) -> None:
        """Everything is proved: what was put is whole, and what is damaged is put away."""
        archive, disk = self._opened(), Disk(fault)
        damaged = {key for key, state in self._state.items() if state == DAMAGED and self._path(key).exists()}
        try:
            with disk.failing():
                report = archive.verify()
        except (ArchiveError, OSError) as error:
            must(disk.kind == "error", f"verify: {told(error)}")
            self._met("everything is verified on a disk that fails")
        else:
            must(set(report.quarantined) <= damaged, "what nobody has damaged is called damaged")
            if disk.kind != "error":
                must(damaged <= set(report.quarantined), "what is damaged is not named")
                there = [key for key, state in self._state.items() if state == THERE]
                must(report.read >= len(there), "what is there was not read")
            self._met(f"everything is verified{' beside a damaged object' if damaged else ''}")
        self._check_list()

    def forget(self, tenant: int, fault: Sequence[Any] | None) -> None:
        """A tenant is forgotten: afterwards nothing of it is anywhere."""
        archive, disk = self._opened(), Disk(fault)
        own = [key for key, (whose, _) in self._keys.items() if whose == tenant]
        try:
            with disk.failing():
                archive.forget(TENANTS[tenant])
        except (ArchiveError, OSError) as error:
            must(disk.kind == "error", f"forget: {told(error)}")
            self._met("a tenant is not wholly forgotten: a call fails")
            for key in own:
                self._state[key] = UNSURE if self._state[key] == THERE else self._state[key]
            return
        for key in own:
            self._state[key] = GONE
        self._nowhere([TENANTS[tenant], *own])
        self._met(f"a tenant is forgotten{' on a full disk' if disk.kind == 'full' else ''}")
        if tenant in self._away:
            self._met("a tenant is forgotten beside what was put away")
        self._away.discard(tenant)
        self._check_list()

    def gc(self, fault: Sequence[Any] | None) -> None:
        """What is beyond the limit goes."""
        archive, disk = self._opened(), Disk(fault)
        try:
            with disk.failing():
                gone = archive.gc()
        except (ArchiveError, OSError) as error:
            must(disk.kind == "error", f"gc: {told(error)}")
        else:
            self._met("the least recently used go" if gone else "gc frees nothing")
        self._swept(archive, None)
        self._check_list()

    # How it is judged.

    def _opened(self) -> Archive:
        if self._archive is None:
            self._open()
        assert self._archive is not None
        return self._archive

    def _open(self) -> None:
        self._archive = Archive(self._folder, limit=self._limit)
        vocabulary = Vocabulary(lambda text: [], lambda ids: "")
        for tenant in TENANTS[len(self._libraries) :]:
            self._libraries.append(Library(self._archive, self._model, vocabulary, tenant, self._identity))
        for library in self._libraries:
            library._archive = self._archive  # a library's own work, recognising the model, is done once

    def _key(self, tenant: int, text: int) -> str | None:
        return next((key for key, what in self._keys.items() if what == (tenant, text)), None)

    def _path(self, key: str) -> Path:
        return self._folder / "objects" / key[:2] / f"{key}.safetensors"

    def _look_up(self, key: str) -> None:
        """What is read is the text's own, or a miss where it may be one."""
        tenant, text = self._keys[key]
        state, chunk = self._state[key], self._libraries[tenant].get(key)
        if chunk is None:
            must(state != THERE, "what was put is not there")
            self._met("a damaged chunk is a miss" if state == DAMAGED else "a forgotten chunk is a miss")
            if state == DAMAGED:
                self._away.add(tenant)
            self._state[key] = UNSURE if state == UNSURE else GONE
            return
        must(state in (THERE, UNSURE), f"what is {state} was read")
        must(list(chunk.ids) == self.text(text), "another text was read")
        self._met("a chunk is read")
        self._state[key] = THERE

    def _check(self, key: str) -> None:
        """By a disk that is well."""
        self._look_up(key)

    def _swept(self, archive: Archive, newest: str | None) -> None:
        """With a limit, what was not used lately may be gone."""
        if self._limit is None:
            return
        listed = {entry.key for entry in archive.entries()}
        there = [key for key, state in self._state.items() if state == THERE]
        gone = [key for key in there if key not in listed]
        must(newest not in gone, "the chunk that was put is gone")
        for key in gone:
            self._state[key] = GONE
        if gone:
            self._met("the least recently used go")

    def _check_list(self) -> None:
        """What is listed is there, once; of a damaged object, nothing but its payload may be."""
        entries = self._opened().entries()
        listed = {entry.key: entry for entry in entries}
        must(len(listed) == len(entries), "a chunk is listed twice")
        for key in set(listed) - set(self._keys):
            self._adopt(key, TENANTS.index(str(listed[key].tenant)))
        for key, state in self._state.items():
            if state == THERE:
                must(key in listed, "what was put is not listed")
            if state == GONE:
                must(key not in listed, "what is gone is listed")
        for key, entry in listed.items():
            must(entry.tenant == TENANTS[self._keys[key][0]], "a chunk is listed as another tenant's")
        for key in list(self._state):
            if self._state[key] != GONE or not listed:
                self._look_up(key)

    def _adopt(self, key: str, tenant: int) -> None:
        """A chunk that is listed, although its put failed."""
        chunk = self._libraries[tenant].get(key)
        must(chunk is not None, "what is listed cannot be read, and nobody has damaged it")
        assert chunk is not None
        found = [number for whose, number in self._tried if whose == tenant and self.text(number) == list(chunk.ids)]
        must(len(found) == 1, "a chunk is listed that nobody has put")
        self._keys[key], self._state[key] = (tenant, found[0]), THERE

    def _nowhere(self, names: Sequence[str]) -> None:
        """No file has these words in its name or bytes."""
        for path in self._folder.rglob("*"):
            with suppress(FileNotFoundError):
                found = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
                for name in names:
                    must(name.encode() not in found, f"{name} was forgotten, and is in {path.name}")
