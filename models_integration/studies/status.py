"""Status of the runs in a folder: finished samples, failures, running workers, and remaining time."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from models_integration.studies.evidence.run import study_unit
from models_integration.studies.leases import Leases
from models_integration.studies.results import STUDY, Row, load_rows
from spec.errors import SpecError

__all__ = ["begun", "failed_samples", "first_failure", "status"]


def failed_samples(path: Path) -> list[Row]:
    """Return the rows of the samples whose last attempt failed."""
    leases = Leases(path, study_unit)
    leases.stored()
    return list(leases.failed.values())


def first_failure(path: Path) -> str:
    """Return the number of failed samples and the first error as text, or "" if no sample failed."""
    failed = failed_samples(path)
    if not failed:
        return ""
    return f"{len(failed)} samples in {path} failed, the first by {failed[0]['error']}; --again makes them again"


def begun(folder: Path) -> bool:
    """Return True if the folder has a file of a run."""
    return (folder / STUDY).exists() or any(folder.glob(f".{STUDY}-*"))


def status(folder: Path, watch: bool = True) -> Iterator[str]:
    """Yield lines about each run: numbers of finished, planned and failed samples.

    With `watch`, the function waits some seconds and also yields each error, the running workers, and an estimate of
    the remaining time. A worker whose lease is not touched during the wait counts as dead.

    Raises:
        SpecError: if no run has a file in the folder.
    """
    path = folder / STUDY
    if not begun(folder):
        raise SpecError("status", str(folder), f"must be the --out folder of a run, but has no {STUDY}")
    leases = Leases(path, study_unit)
    done, planned = leases.stored(), leases.planned()
    of = f" of {len(planned | done)}" if planned else ""
    yield f"{path}: {len(done) - len(leases.failed)}{of} samples done, {len(leases.failed)} failed"
    if watch:
        yield from _watched(path, leases, len(planned - done))


def _watched(path: Path, leases: Leases, left: int) -> Iterator[str]:
    for row in leases.failed.values():
        yield f"  failed: {row['task']}, number {row['index']}: {row['error']}"
    holders = leases.holders()
    for holder, alive in holders:
        who = f"process {holder.get('pid', '?')} of {holder.get('host', '?')}"
        silent = "" if alive else "; SILENT: killed, or on its way out"
        yield f"  under way: {who}, since {holder.get('since', '?')} by its clock{silent}"
    at_work, took = sum(alive for _, alive in holders), [_seconds(row) for row in load_rows(path)]
    if left and at_work and took:
        about = timedelta(seconds=round(left * sum(took) / len(took) / at_work))
        yield f"  {about} to go with {at_work} at work"


def _seconds(row: Row) -> float:
    seconds = row["seconds"]
    return float(sum(seconds.values()) if isinstance(seconds, dict) else seconds)
