"""Files of the user: texts that kvspec reads, and checks of the paths that kvspec writes to.

Every command reads texts with `read_text`, and checks its outputs with `check_output` or `check_results` first. All
other files of the user are opened with `regular`, because a FIFO would wait for a different process for ever.
"""

import errno
import lzma
import os
import re
import stat
import tomllib
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from spec.errors import SpecError

__all__ = [
    "ARCHIVE_ERRORS", "check_no_links", "check_output", "check_output_folder", "check_readable", "check_regular",
    "check_results", "check_unpacked", "decode_text", "parse_toml", "read_bytes", "read_file", "read_text", "regular",
    "replace_text",
]

MOST_UNPACKED = 2**28
"""Maximum number of bytes of a compressed file after unpacking."""
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32}""")
"""Begin of a key with more than 32 parts. A search takes linear time."""
ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, MemoryError, RecursionError)
"""Errors of a malformed archive that are neither an OSError nor a ValueError."""
MOST_RATIO = 16
"""Maximum ratio of the sizes of a larger archive after and before unpacking. Zeros have a ratio of 1000."""

_MARKS: dict[str, tuple[bytes, ...]] = {
    ".html": (b'<meta name="generator" content="kvspec">',),
    ".tex": (b"% Written by kvspec.",),
    ".csv": (b"budget_requested,", b"spec_version,"),
    ".svg": (b"<dc:title>kvspec</dc:title>",),
    ".pdf": (b"/Creator (kvspec)",),
    ".png": (b"Software\0kvspec",),
    ".toml": (b"schema = ", b"verdict = ", b"[subject]"),
    ".txt": (b"Log of kvspec verify.\n",),
    ".npz": (b"header.npy", b"magnitude.npy", b"inv_freq.npy"),
}
"""Bytes that every file of kvspec contains, by suffix. A file with a different suffix is never recognised.

A .toml file is recognised if it is a certificate, and a .txt file if it is a log of `kvspec verify`. A .csv file with
answers is recognised by `_ANSWERS`.
"""
_END = 2**16
"""Number of bytes at the start and at the end of a file that may contain the bytes in _MARKS."""
_ANSWERS = b"policy,budget,text,question,expected,answer,score,"
"""First bytes of a .csv file with the answers to the user's own questions."""


def regular(path: str, flags: int) -> int:
    """Open a regular file. Pass this function to `open` as `opener`, for reading and for writing.

    Raises:
        OSError: if the path is a FIFO, a socket or a device, or from the file system.
    """
    return _opened(path, flags, stat.S_IFREG)


def _regular_or_pipe(path: str, flags: int) -> int:
    return _opened(path, flags, stat.S_IFREG, stat.S_IFIFO)


def _opened(path: str, flags: int, *kinds: int) -> int:
    # With O_NONBLOCK, opening a FIFO without a writer does not wait. Python refuses a folder with its own error.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind not in (*kinds, stat.S_IFDIR):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "must be a regular file", path)
    if kind == stat.S_IFIFO:
        os.set_blocking(descriptor, True)
    return descriptor


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return all bytes of a regular file.

    Raises:
        OSError: as in `regular`.
    """
    with open(path, "rb", opener=regular) as file:
        return file.read()


def replace_text(path: Path, text: str) -> None:
    """Write a text file. If the disk is full, an existing file is unchanged.

    Raises:
        OSError: from the file system.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check before a library opens a file that the file is a regular file.

    Raises:
        OSError: as in `regular`.
    """
    with open(path, "rb", opener=regular):
        pass


def check_readable(argument: str, path: Path) -> None:
    """Check that a file of the user is a regular file that can be opened.

    Raises:
        SpecError: if not.
    """
    try:
        check_regular(path)
    except (OSError, ValueError) as error:
        raise _unreadable(argument, path, error) from error


def read_file(argument: str, path: Path) -> bytes:
    """Return all bytes of a file of the user.

    Raises:
        SpecError: if the file cannot be read.
    """
    try:
        return read_bytes(path)
    except (OSError, ValueError) as error:
        raise _unreadable(argument, path, error) from error


def decode_text(argument: str, path: Path, data: bytes, encoding: str = "utf-8") -> str:
    """Return the text of a UTF-8 file with this content.

    Raises:
        SpecError: if the content is not UTF-8.
    """
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        reason = f"is not UTF-8 (byte {data[error.start]:#x} in line {line}): save the file with the encoding UTF-8"
        raise SpecError(argument, str(path), reason) from error


def _unreadable(argument: str, path: Path, error: Exception) -> SpecError:
    """Return the error about a path with which the file system or Python raised an error."""
    reason = getattr(error, "strerror", None) or error
    return SpecError(argument, str(path), f"cannot be read ({reason}): give the path of a file")


def read_text(argument: str, path: Path) -> str:
    r"""Return the text of a UTF-8 file, plain or .xz. Line ends stay as they are in the file, such as \r\n.

    The byte order mark at the start, which some editors of Windows write, is no part of the text. The path may also be
    a pipe with a writer, such as `<(pdftotext paper.pdf -)` in a shell.

    Raises:
        SpecError: if the file cannot be read as text, or if a .xz file has a text of more than MOST_UNPACKED bytes.
    """
    try:
        with open(path, "rb", opener=_regular_or_pipe) as file:
            data = _unpacked(argument, path, file) if path.suffix == ".xz" else file.read()
    except SpecError:
        raise
    except (EOFError, lzma.LZMAError) as error:
        raise SpecError(argument, str(path), f"is not a whole .xz file ({error}): make the file again") from error
    except (OSError, ValueError) as error:
        raise _unreadable(argument, path, error) from error
    return decode_text(argument, path, data, "utf-8-sig")


def _unpacked(argument: str, path: Path, packed: BinaryIO) -> bytes:
    with lzma.open(packed) as file:
        data = file.read(MOST_UNPACKED + 1)
    if len(data) > MOST_UNPACKED:
        raise SpecError(argument, str(path), f"has more than {MOST_UNPACKED} bytes of text: unpack the file first")
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text, without the byte order mark that some editors of Windows write.

    Python's parser needs quadratic time for a key with many dots.

    Raises:
        ValueError: if the text is not TOML, is nested too deeply, or has a key with more than 32 parts.
    """
    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 32 parts")
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:
        raise ValueError(str(error)) from error


def check_unpacked(path: str | os.PathLike[str]) -> None:
    """Check before an archive such as .npz or .pt is read that the parts do not take the memory of this machine.

    Files of kvspec, NumPy and torch are hardly compressed. A regular file that is no archive passes.

    Raises:
        ValueError: if the parts have more than MOST_UNPACKED bytes, and more than MOST_RATIO times those of the file.
        OSError: as in `regular`.
    """
    check_regular(path)
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > max(MOST_UNPACKED, MOST_RATIO * os.path.getsize(path)):
        raise ValueError(f"its parts have {size} bytes, and the file has {os.path.getsize(path)}")


def check_output(option: str, path: Path, reads: Iterable[Path] = (), force: bool = False) -> None:
    """Check before the work that a command may write a file. The check creates nothing.

    Args:
        option: name of the option that contains the path.
        path: file to write.
        reads: files that the command reads. The command never writes to these files.
        force: if True, the file may replace a file that kvspec did not make.

    Raises:
        SpecError: if the path is a folder, if the file cannot be written, or if the command reads the file. Also if the
            file exists, kvspec did not make the file, and `force` is False.
    """
    if not _exists(option, path):
        check_output_folder(option, path.parent)
        return
    if path.is_dir():
        raise SpecError(option, str(path), "must be a file, but is a folder")
    if not os.access(path, os.W_OK):
        raise SpecError(option, str(path), "is not writable; choose a different file")
    for read in reads:
        if read.exists() and path.samefile(read):
            raise SpecError(option, str(path), "is a file that the command reads; choose a different file")
    # A device such as /dev/stdout and an empty file lose nothing.
    if not (force or not path.is_file() or path.stat().st_size == 0 or _is_ours(path)):
        reason = "exists, and kvspec did not make the file; choose a different file, or add --force to replace the file"
        raise SpecError(option, str(path), reason)


def check_results(option: str, folder: Path, names: Iterable[str], rows: str = "", force: bool = False) -> None:
    """Check that a command may write the files of its results to a folder.

    A folder belongs to kvspec if the folder has the file `rows`, or a file that kvspec recognises. Then a run may
    continue and write its files again.

    Args:
        option: name of the option that contains the folder.
        folder: folder with the results.
        names: names of the files that the command writes.
        rows: name of the file to which the command appends rows, if any.
        force: if True, the files may replace files that kvspec did not make.

    Raises:
        SpecError: as in `check_output` and `check_no_links`.
    """
    paths = [folder / name for name in names]
    existing = [path for path in paths if _exists(option, path)]
    check_no_links(option, paths)
    if not any(map(_is_ours, existing)) and not (rows and (folder / rows).exists()):
        for path in existing:
            check_output(option, path, force=force)


def check_no_links(option: str, paths: Iterable[Path]) -> None:
    """Check that no path is a symbolic link, a FIFO or a device. Writing to a link would replace a file outside of the
    folder, and a FIFO waits for a different process.

    Raises:
        SpecError: if a path is one of these. `force` does not change this.
    """
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            reason = "must be a regular file; remove the FIFO or device, or choose a different folder"
            raise SpecError(option, str(path), reason)
        if path.is_symlink():
            reason = "is a symbolic link to a different file; remove the link, or choose a different folder"
            raise SpecError(option, str(path), reason)


def _exists(option: str, path: Path) -> bool:
    """Return True if a path exists.

    Raises:
        SpecError: if the name of the path is too long, or if a folder in the path must not be read.
    """
    try:
        return path.exists()
    except OSError as error:
        reason = f"is not a possible path ({error.strerror}); choose a different path"
        raise SpecError(option, str(path), reason) from error


def _is_ours(path: Path) -> bool:
    """Return True if kvspec made a file."""
    marks = _MARKS.get(path.suffix)
    if marks is None:
        return False
    try:
        data = _ends(path)
    except OSError:  # a folder, a FIFO, a device, or a file that must not be read
        return False
    if path.suffix == ".csv" and data.startswith(_ANSWERS):
        return True
    return all(mark in (data.partition(b"\n")[0] if path.suffix == ".csv" else data) for mark in marks)


def _ends(path: Path) -> bytes:
    """Return the first and the last _END bytes of a regular file. The file may be larger than the memory.

    Raises:
        OSError: as in `regular`.
    """
    with open(path, "rb", opener=regular) as file:
        first = file.read(_END)
        at = max(len(first), os.fstat(file.fileno()).st_size - _END)
        file.seek(at)
        return first + file.read(_END)


def check_output_folder(option: str, folder: Path) -> None:
    """Check that a folder exists or can be created, and that files can be written to the folder.

    The check creates nothing, because all workers of a study check the folder at the same time.

    Raises:
        SpecError: if the folder cannot be created or written.
    """
    try:
        nearest = _nearest_folder(folder.absolute())
    except OSError as error:
        reason = f"cannot be created as a folder ({error.strerror}); choose a different path"
        raise SpecError(option, str(folder), reason) from error
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SpecError(option, str(folder), "is not writable; choose a different folder")


def _nearest_folder(folder: Path) -> Path:
    """Return the folder if the folder exists, else the nearest parent folder that exists.

    Raises:
        OSError: if the path is a file or a broken link, or if the name of the folder is invalid.
    """
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return _nearest_folder(folder.parent)
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return folder
