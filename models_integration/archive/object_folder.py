"""Files of an archive: objects, unfinished temporary files, and the quarantine for damaged objects."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from models_integration.archive.errors import ArchiveError, ArchiveReadOnly, named_errors
from models_integration.archive.keyring import key_in
from models_integration.cache.atomic_file import TEMPORARY, DeferredBytes, erase, is_being_written, publish, sync

__all__ = ["File", "ObjectFolder"]

SUFFIX = ".safetensors"
ASIDE = ".aside"
"""End of the name of a file that a reader moved aside, until the reader has checked that the file is damaged."""
ORPHAN_SECONDS = 3600.0
OF_EARLIER_VERSIONS = ("catalogue.", "clock")
"""Start of the file names of the list of objects, which archives up to `kvarc/3` had."""


class File(NamedTuple):
    """Metadata of a file. A different file of the same name differs in at least one of these fields."""

    device: int
    number: int
    bytes: int
    used: int
    """Time of the last write, or of the last read by `touch`, in nanoseconds."""


class ObjectFolder:
    """Folder of objects, with paths by key. Links are never followed, because their targets are outside the archive.

    Raises:
        ArchiveFull, ArchiveReadOnly: if the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects, self._damaged, self._keys = folder / "objects", folder / "quarantine", folder / "keys"
        there = self._objects.is_dir()
        try:
            with named_errors(folder):
                self._make()
        except ArchiveReadOnly:
            if not there:  # otherwise the archive is on a read-only medium and has no quarantine
                raise
        if self._objects.is_symlink():
            raise ArchiveError(f"{self._objects} must be a folder, not a link")
        if os.path.lexists(self._keys) and not self._keys.is_dir():
            raise ArchiveError(f"{self._keys} must be a folder: it holds the salts of an encrypted archive")

    def _make(self) -> None:
        """Make all shard folders now, so that the first object of a shard need not wait. Only the owner has access.

        The quarantine is made last. If the quarantine exists, the names of all other folders are durable, including
        parents of the archive that a killed process may have made.
        """
        if self._objects.is_dir() and os.path.lexists(self._damaged):
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        shards = [self._objects / f"{shard:02x}" for shard in range(256)]
        for path in (self.folder, self._objects, *shards):
            path.mkdir(exist_ok=True, mode=0o700)
        device = os.stat(self.folder).st_dev
        # The parent of a mounted file system existed before.
        around = takewhile(lambda path: os.stat(path).st_dev == device, self.folder.absolute().parents)
        for path in (self._objects, self.folder, *around):
            with suppress(PermissionError):  # a parent folder without read permission
                sync(path)
        self._damaged.mkdir(exist_ok=True, mode=0o700)

    @property
    def has_keys(self) -> bool:
        """Return True if the archive ever had an encrypted object. The folder of salts is never deleted."""
        return self._keys.is_dir()

    def path(self, key: str) -> Path:
        """Return the path of an object. The object may not exist."""
        return self._objects / key[:2] / f"{key}{SUFFIX}"

    def object_keys(self) -> list[str]:
        """Return the keys of all objects, ascending."""
        return sorted(key for path in _files(self._objects) if (key := self._key(path)) is not None)

    def strays(self) -> list[str]:
        """Return entries that cannot be objects: files with wrong names, and folders in place of files.

        A quarantine that is a file or a link is included, because it may hide damaged objects.

        Temporary files are not included.
        """
        strays = [path for path in _files(self._objects) if not _is_temporary(path) and not self._key(path)]
        strays += [path for path in self._objects.glob("??/*") if self._key(path) and _is_folder(path)]
        strays += [self._damaged] * (os.path.lexists(self._damaged) and not _is_folder(self._damaged))
        return [self.name(path) for path in strays]

    def in_quarantine(self) -> list[Path]:
        """Return the files in the quarantine, without temporary files."""
        return [path for path in _files(self._damaged) if not _is_temporary(path)]

    def name(self, path: Path) -> str:
        """Return the path relative to the archive."""
        return str(path.relative_to(self.folder))

    def everything(self) -> list[Path]:
        """Return all files with data of tenants: objects, damaged objects and temporary files."""
        return [*_files(self._objects), *_files(self._damaged)]

    def by_use(self) -> list[tuple[str, Path, int]]:
        """Return the files that count towards the limit, with sizes: quarantine first, then objects by last use.
        """
        files = []
        for path in [*self.in_quarantine(), *map(self.path, self.object_keys())]:
            if (file := self.describe(path)) is not None:
                key = self._key(path)
                files.append((key is not None, file.used, key or self.name(path), path, file.bytes))
        return [(name, path, size) for _, _, name, path, size in sorted(files)]

    def describe(self, path: Path) -> File | None:
        """Return the metadata of a file (of the link itself for a link), or None if the file does not exist.

        Raises:
            OSError: from the file system.
        """
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        return File(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def touch(self, key: str) -> None:
        """Record a use, by the clock of the file system. On a read-only medium nothing is recorded."""
        with suppress(OSError):
            os.utime(self.path(key), follow_symlinks=False)

    def publish(self, path: Path, parts: Sequence[memoryview], digest: DeferredBytes | None) -> None:
        """Write an object. A replaced object is overwritten and deleted.

        Raises:
            ArchiveError, OSError: from the file system.
        """
        if path.parent.is_symlink():
            raise ArchiveError(f"{path.parent} must be a folder, not a link")
        with named_errors(path):
            if _is_folder(path) and (key := self._key(path)) is not None:
                self.put_away(key, self.describe(path))
            replaced = _temporary(path)
            with suppress(OSError):  # the object is new, or the file system has no hard links
                os.link(path, replaced, follow_symlinks=False)
            try:
                publish(path, parts, late=digest)
                erase(replaced)
            except BaseException:
                with suppress(OSError):
                    os.unlink(replaced)
                raise

    def keep(self, key: str) -> None:
        """Make the name of an object durable. The writer may have been killed before doing this.

        Raises:
            ArchiveError, OSError: from the file system.
        """
        with named_errors(self.path(key)):
            sync(self.path(key).parent)

    def orphans(self) -> list[Path]:
        """Return temporary files without a writer that are older than an hour by the file system's clock.

        The list of objects that archives up to `kvarc/3` had is included.
        """
        now = self._now()
        everything = [*self.everything(), *_files(self._keys), *self._loose((TEMPORARY,))]
        return self.leftovers() + [
            path for path in everything if _is_temporary(path) and (file := self.describe(path)) is not None
            and file.used < now - ORPHAN_SECONDS * 1e9 and not is_being_written(path)
        ]

    def leftovers(self) -> list[Path]:
        """Return the files of the list that archives up to `kvarc/3` had. The list contains names of tenants."""
        return self._loose(OF_EARLIER_VERSIONS)

    def put_away(self, key: str, damaged: File | None) -> None:
        """Move a damaged object to the quarantine, if the file was not replaced since it was read.

        Raises:
            OSError: from the file system.
        """
        path, place = self.path(key), self._damaged / f"damaged-{key}{SUFFIX}"
        if damaged is None or self._damaged.is_symlink() or self.describe(path) != damaged:
            return
        if not _is_folder(path):
            erase(place)
            os.link(path, place, follow_symlinks=False)
            if self.describe(place) != damaged:  # a different process has replaced the object
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
        """Move a file back that a killed reader had moved aside, if its name is free.

        Return True if the file existed.
        """
        path = self.path(key)
        moved = [other for other in _files(path.parent) if other.suffix == ASIDE and key_in(other.name) == key]
        with suppress(FileNotFoundError):  # a different process has moved the file back
            for aside in moved:
                self._put_back(aside, path)
        return bool(moved)

    def restore_all(self) -> None:
        """Move all files that killed readers had moved aside back to their names.

        Raises:
            OSError: from the file system.
        """
        for key in self.set_aside():
            self.restore(key)

    def set_aside(self) -> list[str]:
        """Return the keys of files that killed readers had moved aside and that no process has replaced, ascending."""
        keys = {key_in(path.name) for path in _files(self._objects) if path.suffix == ASIDE}
        return sorted(key for key in keys if key is not None and self.describe(self.path(key)) is None)

    def _put_back(self, aside: Path, path: Path) -> None:
        """Move a file back, unless a new file has the name. The name is durable before the old name is removed."""
        with suppress(FileExistsError):
            os.link(aside, path, follow_symlinks=False)
        sync(path.parent)
        os.unlink(aside)

    def erase(self, path: Path) -> bool:
        """Overwrite and remove a file. Return True if the file existed.

        Raises:
            OSError, ArchiveReadOnly: from the file system.
        """
        if path.parent.is_symlink():
            return False
        with named_errors(path):
            there = erase(_nameless(path))
            if path.parent == self._damaged and (key := key_in(path.name)) is not None:
                with suppress(FileNotFoundError):
                    # The removal of the object's first name may not be durable yet.
                    sync(self.path(key).parent)
            return there

    def erase_all(self, paths: Iterable[Path], failed: list[Exception]) -> int:
        """Erase all files that can be erased. Return their number, and append errors to `failed`."""
        gone = 0
        for path in paths:
            try:
                gone += self.erase(path)
            except (ArchiveError, OSError) as error:
                failed.append(error)
        return gone

    def _key(self, path: Path) -> str | None:
        """Return the key of an object from its path, or None."""
        key = key_in(path.name)
        return key if key is not None and path == self.path(key) else None

    def _loose(self, beginnings: tuple[str, ...]) -> list[Path]:
        """Return files of the archive that are not in a shard folder."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            return [
                Path(entry.path) for entry in entries
                if entry.name.startswith(beginnings) and not entry.is_dir(follow_symlinks=False)
            ]
        return []

    def _now(self) -> int:
        """Return the time of the file system's clock, which may be the clock of a different machine."""
        os.utime(self._objects)
        return os.stat(self._objects).st_mtime_ns


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def _nameless(path: Path) -> Path:
    """Rename the file to a temporary name before erasing, so that a partly erased file is never read as an object."""
    temporary = _temporary(path)
    if not _is_temporary(path):
        with suppress(OSError):  # the file is erased under its present name
            os.rename(path, temporary)
            return temporary
    return path


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield Path(entry.path)
