"""The files of an archive: objects, what writers left unfinished, and what was put away as damaged."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from models_integration.archive.errors import ArchiveError, named_errors
from models_integration.archive.names import key_in
from models_integration.cache.atomic_file import TEMPORARY, Late, erase, is_being_written, publish, sync

__all__ = ["ObjectFolder"]

SUFFIX = ".safetensors"
ORPHAN_SECONDS = 3600.0


class ObjectFolder:
    """Paths by key. Links are never followed: what they lead to is not the archive's.

    Raises:
        ArchiveFull, ArchiveReadOnly: for a folder that cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects, self._damaged = folder / "objects", folder / "quarantine"
        with named_errors(folder):
            self._make()
        if self._objects.is_symlink():
            raise ArchiveError(f"{self._objects} must be a folder, not a link")

    def _make(self) -> None:
        if not self._objects.is_dir():
            for shard in range(256):  # now, or each first object of a shard would wait for two more folders
                (self._objects / f"{shard:02x}").mkdir(parents=True, exist_ok=True, mode=0o700)
            sync(self._objects)
        with suppress(OSError):  # an archive of before, on a medium that cannot be written
            self._damaged.mkdir(exist_ok=True, mode=0o700)

    def path(self, key: str) -> Path:
        """Where an object is, or would be."""
        return self._objects / key[:2] / f"{key}{SUFFIX}"

    def place_of_damaged(self, key: str) -> Path:
        """Where an object is put away."""
        return self._damaged / f"damaged-{key}{SUFFIX}"

    def keys(self) -> list[str]:
        """Of all objects, ascending."""
        found = ((path, key_in(path.name)) for path in _files(self._objects))
        return sorted(key for path, key in found if key is not None and path == self.path(key))

    def everything(self) -> list[Path]:
        """All that came from tenants: objects, damaged ones, temporary files."""
        return [*_files(self._objects), *_files(self._damaged)]

    def by_age(self, keys: Iterable[str]) -> list[str]:
        """Keys, the objects that were written first first: by the file system's clock, which may have been set."""
        return sorted(keys, key=lambda key: (_changed(self.path(key)), key))

    def publish(self, path: Path, parts: Sequence[memoryview], digest: Late | None) -> None:
        """Write an object.

        Raises:
            ArchiveError, OSError: from the file system.
        """
        if path.parent.is_symlink():
            raise ArchiveError(f"{path.parent} must be a folder, not a link")
        with named_errors(path):
            publish(path, parts, late=digest)

    def orphans(self) -> list[Path]:
        """Temporary files that no writer holds, and that are older than an hour by the file system's own clock."""
        now = self._now()
        return [
            path for path in [*_files(self._objects), *self._loose()]
            if path.name.startswith(TEMPORARY) and _changed(path) < now - ORPHAN_SECONDS * 1e9
            and not is_being_written(path)
        ]

    def put_away(self, key: str) -> bool:
        """Move a damaged object to the quarantine; whether it is gone from its place, now or before."""
        if self._damaged.is_symlink():
            return False
        try:
            os.replace(self.path(key), self.place_of_damaged(key))
        except OSError:
            return not os.path.lexists(self.path(key))
        return True

    def erase(self, path: Path) -> bool:
        """Overwrite and remove one of these files; whether it was there.

        Raises:
            OSError, ArchiveReadOnly: from the file system.
        """
        if path.parent.is_symlink():
            return False
        with named_errors(path):
            return erase(_nameless(path))

    def erase_object(self, key: str) -> None:
        """Erase an object, and a damaged copy that was put away before; errors as of `erase`."""
        for path in (self.path(key), self.place_of_damaged(key)):
            self.erase(path)

    def erase_all(self, paths: Iterable[Path], failed: list[Exception]) -> int:
        """Erase as many as can be; how many, and what went wrong is added to `failed`."""
        gone = 0
        for path in paths:
            try:
                gone += self.erase(path)
            except (ArchiveError, OSError) as error:
                failed.append(error)
        return gone

    def _loose(self) -> list[Path]:
        """Temporary files beside the folders."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as found:
            return [Path(entry.path) for entry in found if entry.name.startswith(TEMPORARY)]
        return []

    def _now(self) -> int:
        """By the clock that stamps the files, which may be another machine's."""
        clock = self.folder / "clock"
        descriptor = os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.utime(descriptor)
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)


def _nameless(path: Path) -> Path:
    """The file under a name of an unfinished one, so that none that is half erased passes for an object."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    if not path.name.startswith(TEMPORARY):
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


def _changed(path: Path) -> int:
    """Nanoseconds; 0 for a file that is gone."""
    try:
        return os.lstat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
