"""Checks of options and files that commands make before the work begins."""

import os
from collections.abc import Iterable
from pathlib import Path

import typer

from experiments.studies.results import load_rows
from models_integration.policies.methods import constants_of, parse_policy
from reference.calibration import Calibration, load_calibration
from reference.policies.names import DIVERSE, home_of
from spec.errors import SpecError
from spec.files import check_no_links, check_output_folder, check_results, read_text

__all__ = ["calibration_of", "check_counts", "check_defaults", "check_folder", "read_prompt"]


def check_folder(option: str, folder: Path, rows: str, pages: Iterable[str] = (), force: bool = False) -> None:
    """Check that a run may write results to a folder.

    The check creates nothing, because all workers of a study check the folder at the same time.

    Args:
        option: name of the option that contains the folder.
        folder: folder to check. The first file that is written creates the folder.
        rows: name of the result file in the folder to which a run appends rows.
        pages: names of the other files that the run writes.
        force: if True, pages may replace files that kvspec did not make.

    Raises:
        SpecError: if the folder cannot be created or written, or if the result file cannot be read or written. Also if
            a page would replace a file that kvspec did not make, or if a file of the run is a symbolic link.
    """
    check_output_folder(option, folder)
    file = folder / rows
    others = (path for pattern in (f".{rows}-*", "worker-*.log") for path in folder.glob(pattern))
    check_no_links(option, (file, folder / f"{rows}.cut", *others))
    if file.exists() and not (file.is_file() and os.access(file, os.R_OK | os.W_OK)):
        raise SpecError(option, str(file), "must be a file that can be read and written")
    load_rows(file)
    check_results(option, folder, pages, rows, force)


def read_prompt(argument: str, path: Path) -> str:
    """Return the text of a file, which must not be empty.

    Raises:
        SpecError: if the file cannot be read, or has no text.
    """
    text = read_text(argument, path)
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


def check_defaults(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Check that options have their default values, for example because a file contains the same settings.

    Raises:
        SpecError: if an option was given. The message contains the reason.
    """
    for name in names:
        if getattr(context.get_parameter_source(name), "name", None) != "DEFAULT":
            value = context.params[name]
            raise SpecError(name, str(value) if isinstance(value, Path) else value, reason)


def _source_of(policies: Iterable[str]) -> str:
    """Return an example of the file from which `kvspec calibrate` makes the calibration of the policies."""
    files = {"kvzap": "KVzap/model.safetensors", "fast-kvzip": "gates.safetensors"}
    names = [home_of(parse_policy(policy)[0]).removeprefix(DIVERSE) for policy in policies]
    return next((files[name] for name in names if name in files), "some-text.txt")


def calibration_of(policies: Iterable[str], path: Path | None) -> Calibration | None:
    """Return the calibration in a file. Without a file, return None.

    Raises:
        SpecError: if a policy needs a calibration and no file is given, if there is no policy, or if the file is not a
            calibration file.
    """
    policies = list(policies)
    if path is not None and not policies:
        raise SpecError("calibration", str(path), "needs a policy that uses the file: give a policy too")
    if path is not None:
        return load_calibration(path)
    if needing := [policy for policy in policies if "calibration" in constants_of(parse_policy(policy)[0])]:
        remedy = f"run `kvspec calibrate {_source_of(needing)}` with the same --model, then add --calibration"
        raise SpecError("calibration", None, f"is needed by {', '.join(needing)}: {remedy} calibration.npz")
    return None
