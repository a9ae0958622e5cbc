"""What the commands refuse before they do any work."""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import typer

from models_integration.policies.methods import constants_of, spelled
from models_integration.studies.results import load_rows
from reference.calibration import Calibration, load_calibration
from spec.errors import SpecError

__all__ = ["calibration_of", "check_counts", "check_defaults", "check_file", "check_folder", "read_text"]


def check_folder(option: str, folder: Path, *results: str) -> None:
    """A folder is there or can be made, and files in it. Nothing is made: workers of one sweep look at the same time.

    Args:
        option: that names it.
        folder: it is made with the first file in it.
        results: names of files in it that will be added to.

    Raises:
        SpecError: where it cannot be made or written; for a file of results that cannot be read.
    """
    try:
        nearest = _nearest_folder(folder.absolute())
    except OSError as error:
        reason = f"cannot be created as a folder ({error.strerror}); choose a different path"
        raise SpecError(option, str(folder), reason) from error
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SpecError(option, str(folder), "is not writable; choose a different folder")
    for file in (folder / name for name in results):
        if file.exists() and not (file.is_file() and os.access(file, os.R_OK | os.W_OK)):
            raise SpecError(option, str(file), "must be a file that can be read and written")
        load_rows(file)


def _nearest_folder(folder: Path) -> Path:
    """The folder, or the first above it that is there.

    Raises:
        OSError: for what is no folder, a link to nothing and a name that no folder can have.
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


def check_file(option: str, path: Path) -> None:
    """A file that will be written can be.

    Raises:
        SpecError: otherwise.
    """
    if path.is_dir():
        raise SpecError(option, str(path), "must be a file, but is a folder")
    if not path.exists():
        check_folder(option, path.parent)
    elif not os.access(path, os.W_OK):
        raise SpecError(option, str(path), "is not writable; choose a different file")


def read_text(argument: str, path: Path) -> str:
    """The text of a file.

    Raises:
        SpecError: where it cannot be read, or holds none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(argument, str(path), f"must be a readable text file: {error}") from error
    if not text.strip():
        raise SpecError(argument, str(path), "must not be empty")
    return text


def check_counts(**counts: int) -> None:
    """Each is at least 1.

    Raises:
        SpecError: otherwise.
    """
    for name, count in counts.items():
        if count < 1:
            raise SpecError(name, count, "must be at least 1")


def check_defaults(context: typer.Context, names: Iterable[str], rules: Path) -> None:
    """These options have their defaults: rules say by themselves what the options would.

    Raises:
        SpecError: otherwise.
    """
    for name in names:
        if getattr(context.get_parameter_source(name), "name", None) != "DEFAULT":
            reason = f"cannot be used with a rules file: leave out the option, and edit {rules} instead"
            raise SpecError(name, context.params[name], reason)


def calibration_of(policies: Iterable[str], path: Path | None) -> Calibration | None:
    """The statistics in a file, where one is given.

    Raises:
        SpecError: for a policy that needs one where none is given; for a file that is none.
    """
    if path is not None:
        return load_calibration(path)
    if needing := [policy for policy in policies if "calibration" in constants_of(spelled(policy)[0])]:
        raise SpecError(
            "calibration", None, f"is needed by {', '.join(needing)}: run `kvspec calibrate some-text.txt` with the"
            " same --model, then add --calibration calibration.npz"
        )
    return None
