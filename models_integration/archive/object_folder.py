"""The files of an archive: objects, what writers left unfinished, and what was put away as damaged."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from models_integration.archive.errors import ArchiveError, ArchiveReadOnly, named_errors
from models_integration.archive.names import key_in
from models_integration.cache.atomic_file import TEMPORARY, Late, erase, is_being_written, publish, sync

__all__ = ["File", "ObjectFolder"]

SUFFIX = ".safetensors"
ASIDE = ".aside"
"""How the name ends of what a reader took out of its place, until it has seen that it is the damaged object."""
ORPHAN_SECONDS = 3600.0
OF_EARLIER_VERSIONS = ("catalogue.", "clock")
"""How the names of the list began, which archives had up to `kvarc/3`."""


class File(NamedTuple):
    """Metadata of a file. A different file of the same name differs in at least one of these fields."""

    device: int
    number: int
    bytes: int
    used: int
    """Nanoseconds: when it was written or, by `touch`, last read."""


class ObjectFolder:
    """Paths by key. Links are never followed: what they lead to is not the archive's.

    Raises:
        ArchiveFull, ArchiveReadOnly: for a folder that cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects, self._damaged, self._keys = folder / "objects", folder / "quarantine", folder / "keys"
        there = self._objects.is_dir()
        try:
            with named_errors(folder):
                self._make()
        except ArchiveReadOnly:
            if not there:  # else an archive without a quarantine, on a medium that cannot be written
                raise
        if self._objects.is_symlink():
            raise ArchiveError(f"{self._objects} must be a folder, not a link")
        if os.path.lexists(self._keys) and not self._keys.is_dir():
            raise ArchiveError(f"{self._keys} must be a folder: it holds the salts of an encrypted archive")

    def _make(self) -> None:
        """All shards now, or each first object of a shard would wait for two more folders. Only the owner has rights.

        The quarantine is made last: where it is, the others' names are durable, also of the folders around the archive,
        which a process that was killed may have made.
        """
        if self._objects.is_dir() and os.path.lexists(self._damaged):
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        shards = [self._objects / f"{shard:02x}" for shard in range(256)]
        for path in (self.folder, self._objects, *shards):
            path.mkdir(exist_ok=True, mode=0o700)
        device = os.stat(self.folder).st_dev
        # What holds a mounted file system was there before.
        around = takewhile(lambda path: os.stat(path).st_dev == device, self.folder.absolute().parents)
        for path in (self._objects, self.folder, *around):
            with suppress(PermissionError):  # a folder around the archive that may be passed and not read
                sync(path)
        self._damaged.mkdir(exist_ok=True, mode=0o700)

    @property
    def has_keys(self) -> bool:
        """Whether something was ever encrypted here: the folder of the salts stays when the last one is destroyed."""
        return self._keys.is_dir()

    def path(self, key: str) -> Path:
        """Where an object is, or would be."""
        return self._objects / key[:2] / f"{key}{SUFFIX}"

    def object_keys(self) -> list[str]:
        """Of all objects, ascending."""
        return sorted(key for path in _files(self._objects) if (key := self._key(path)) is not None)

    def strays(self) -> list[str]:
        """What no object can be: files among the objects by their names, folders in their places.

        Also a quarantine that is no folder: a file, or a link, which may hide what was put away.

        Temporary files are none.
        """
        found = [path for path in _files(self._objects) if not _is_temporary(path) and not self._key(path)]
        found += [path for path in self._objects.glob("??/*") if self._key(path) and _is_folder(path)]
        found += [self._damaged] * (os.path.lexists(self._damaged) and not _is_folder(self._damaged))
        return [self.name(path) for path in found]

    def in_quarantine(self) -> list[Path]:
        """What was put away, temporary files excluded."""
        return [path for path in _files(self._damaged) if not _is_temporary(path)]

    def name(self, path: Path) -> str:
        """The path inside the archive."""
        return str(path.relative_to(self.folder))

    def everything(self) -> list[Path]:
        """All that came from tenants: objects, damaged ones, temporary files."""
        return [*_files(self._objects), *_files(self._damaged)]

    def by_use(self) -> list[tuple[str, Path, int]]:
        """What counts towards a limit, with its bytes: the quarantine, then objects by key, least recently used first.
        """
        found = []
        for path in [*self.in_quarantine(), *map(self.path, self.object_keys())]:
            if (file := self.describe(path)) is not None:
                key = self._key(path)
                found.append((key is not None, file.used, key or self.name(path), path, file.bytes))
        return [(name, path, size) for _, _, name, path, size in sorted(found)]

    def describe(self, path: Path) -> File | None:
        """A file, not what a link leads to; None if there is none.

        Raises:
            OSError: from the file system.
        """
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        return File(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def touch(self, key: str) -> None:
        """Note a use, by the clock that stamps the files. A medium that cannot be written forgets it."""
        with suppress(OSError):
            os.utime(self.path(key), follow_symlinks=False)

    def publish(self, path: Path, parts: Sequence[memoryview], digest: Late | None) -> None:
        """Write an object; what is replaced is erased.

        Raises:
            ArchiveError, OSError: from the file system.
        """
        if path.parent.is_symlink():
            raise ArchiveError(f"{path.parent} must be a folder, not a link")
        with named_errors(path):
            if _is_folder(path) and (key := self._key(path)) is not None:
                self.put_away(key, self.describe(path))
            replaced = _temporary(path)
            with suppress(OSError):  # there is none, or the file system has no second names
                os.link(path, replaced, follow_symlinks=False)
            try:
                publish(path, parts, late=digest)
                erase(replaced)
            except BaseException:
                with suppress(OSError):
                    os.unlink(replaced)
                raise

    def keep(self, key: str) -> None:
        """Make the name of an object durable: whoever wrote the object may not have come to that.

        Raises:
            ArchiveError, OSError: from the file system.
        """
        with named_errors(self.path(key)):
            sync(self.path(key).parent)

    def orphans(self) -> list[Path]:
        """Temporary files that no writer holds, and that are older than an hour by the file system's own clock.

        Also the list that archives had up to `kvarc/3`.
        """
        now = self._now()
        everything = [*self.everything(), *_files(self._keys), *self._loose((TEMPORARY,))]
        return self.leftovers() + [
            path for path in everything if _is_temporary(path) and (file := self.describe(path)) is not None
            and file.used < now - ORPHAN_SECONDS * 1e9 and not is_being_written(path)
        ]

    def leftovers(self) -> list[Path]:
        """Files of the list that archives had up to `kvarc/3`; it holds names of tenants."""
        return self._loose(OF_EARLIER_VERSIONS)

    def put_away(self, key: str, damaged: File | None) -> None:
        """Move a damaged object to the quarantine, if the file that was read is still the one of that name.

        Raises:
            OSError: from the file system.
        """
        path, place = self.path(key), self._damaged / f"damaged-{key}{SUFFIX}"
        if damaged is None or self._damaged.is_symlink() or self.describe(path) != damaged:
            return
        if not _is_folder(path):
            erase(place)
            os.link(path, place, follow_symlinks=False)
            if self.describe(place) != damaged:  # another process has put the object meanwhile
                os.unlink(place)
                return
            sync(self._damaged)
        aside = path.with_name(_temporary(path).name + ASIDE)
        os.rename(path, aside)
        try:
            if self.describe(aside) != damaged:
                self._put_back(aside, path)
            elif _is_folder(aside):
                os.rename(aside, self._damaged / f"{place.name}-{secrets.token_hex(4)}")
            else:
                os.unlink(aside)
            sync(path.parent)
        except OSError:
            with suppress(OSError):
                self._put_back(aside, path)
            raise

    def restore(self, key: str) -> bool:
        """Put back what a killed reader had set aside under a free name; whether there was something."""
        path = self.path(key)
        found = [other for other in _files(path.parent) if other.suffix == ASIDE and key_in(other.name) == key]
        with suppress(FileNotFoundError):  # another process has put it back
            for aside in found:
                self._put_back(aside, path)
        return bool(found)

    def restore_all(self) -> None:
        """What killed readers had set aside.

        Raises:
            OSError: from the file system.
        """
        for key in self.set_aside():
            self.restore(key)

    def set_aside(self) -> list[str]:
        """Keys of what killed readers had set aside, and nobody has put since; ascending."""
        found = {key_in(path.name) for path in _files(self._objects) if path.suffix == ASIDE}
        return sorted(key for key in found if key is not None and self.describe(self.path(key)) is None)

    def _put_back(self, aside: Path, path: Path) -> None:
        """Unless there is another by now. The name is durable before the other one goes."""
        with suppress(FileExistsError):
            os.link(aside, path, follow_symlinks=False)
        sync(path.parent)
        os.unlink(aside)

    def erase(self, path: Path) -> bool:
        """Overwrite and remove one of these files; whether it was there.

        Raises:
            OSError, ArchiveReadOnly: from the file system.
        """
        if path.parent.is_symlink():
            return False
        with named_errors(path):
            there = erase(_nameless(path))
            if path.parent == self._damaged and (key := key_in(path.name)) is not None:
                with suppress(FileNotFoundError):
                    # Whoever put the object away may not have made durable that its first name is gone.
                    sync(self.path(key).parent)
            return there

    def erase_all(self, paths: Iterable[Path], failed: list[Exception]) -> int:
        """Erase as many as can be; how many, and what went wrong is added to `failed`."""
        gone = 0
        for path in paths:
            try:
                gone += self.erase(path)
            except (ArchiveError, OSError) as error:
                failed.append(error)
        return gone

    def _key(self, path: Path) -> str | None:
        """The key of an object in its place."""
        key = key_in(path.name)
        return key if key is not None and path == self.path(key) else None

    def _loose(self, beginnings: tuple[str, ...]) -> list[Path]:
        """Files beside the folders."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as found:
            return [
                Path(entry.path) for entry in found
                if entry.name.startswith(beginnings) and not entry.is_dir(follow_symlinks=False)
            ]
        return []

    def _now(self) -> int:
        """By the clock that stamps the files, which may be another machine's."""
        os.utime(self._objects)
        return os.stat(self._objects).st_mtime_ns


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def _nameless(path: Path) -> Path:
    """The file under a name of an unfinished one, so that none that is half erased passes for an object."""
    temporary = _temporary(path)
    if not _is_temporary(path):
        with suppress(OSError):  # it is erased where it is
            os.rename(path, temporary)
            return temporary
    return path


def _files(folder: Path) -> Iterator[Path]:
    """All below a folder that are no folders, links as themselves."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield Path(entry.path)
