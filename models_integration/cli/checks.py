"""Checks of options and files that commands make before the work begins."""

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
    """Check that a folder exists or can be created, and that files can be written to the folder.

    The check creates nothing, because all workers of a sweep check the folder at the same time.

    Args:
        option: name of the option that contains the folder.
        folder: folder to check. The first file that is written creates the folder.
        results: names of result files in the folder to which a run appends rows.

    Raises:
        SpecError: if the folder cannot be created or written, or if a result file cannot be read or written.
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


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written.

    Raises:
        SpecError: if the path is a folder, or if the file cannot be written.
    """
    if path.is_dir():
        raise SpecError(option, str(path), "must be a file, but is a folder")
    if not path.exists():
        check_folder(option, path.parent)
    elif not os.access(path, os.W_OK):
        raise SpecError(option, str(path), "is not writable; choose a different file")


def read_text(argument: str, path: Path) -> str:
    """Return the text of a file.

    Raises:
        SpecError: if the file cannot be read, or has no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(argument, str(path), f"must be a readable text file: {error}") from error
    if not text.strip():
        raise SpecError(argument, str(path), "must not be empty")
    return text


def check_counts(**counts: int) -> None:
    """Check that each number is at least 1.

    Raises:
        SpecError: if a number is smaller than 1. The error names the argument.
    """
    for name, count in counts.items():
        if count < 1:
            raise SpecError(name, count, "must be at least 1")


def check_defaults(context: typer.Context, names: Iterable[str], rules: Path) -> None:
    """Check that options have their default values, because the rules file contains the same settings.

    Raises:
        SpecError: if an option was given.
    """
    for name in names:
        if getattr(context.get_parameter_source(name), "name", None) != "DEFAULT":
            reason = f"cannot be used with a rules file: leave out the option, and edit {rules} instead"
            raise SpecError(name, context.params[name], reason)


def calibration_of(policies: Iterable[str], path: Path | None) -> Calibration | None:
    """Return the calibration in a file. Without a file, return None.

    Raises:
        SpecError: if a policy needs a calibration and no file is given, or if the file is not a calibration file.
    """
    if path is not None:
        return load_calibration(path)
    if needing := [policy for policy in policies if "calibration" in constants_of(spelled(policy)[0])]:
        raise SpecError(
            "calibration", None, f"is needed by {', '.join(needing)}: run `kvspec calibrate some-text.txt` with the"
            " same --model, then add --calibration calibration.npz"
        )
    return None
