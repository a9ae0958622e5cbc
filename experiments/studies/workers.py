"""Workers of a command, and the status of their runs.

Workers are more processes of the same command, or actors of Ray on several machines. Leases in the folder of the
results distribute the units.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from runpy import run_module
from tempfile import TemporaryDirectory

import torch

from experiments.studies.evidence.run import study_unit
from experiments.studies.leases import Leases
from experiments.studies.results import STUDY, Row, check_columns, load_rows
from spec.errors import SpecError
from spec.plugins import current_folder_last, search_path
from spec.printing import counted, printable
from spec.validate import check_choices

__all__ = ["ENGINES", "Launch", "begun", "failed_samples", "first_failure", "run_actors", "status"]

def failed_samples(path: Path) -> list[Row]:
    """Return the rows of the samples whose last attempt failed."""
    leases = Leases(path, study_unit)
    leases.stored()
    return _failed(leases, path)


def _failed(leases: Leases, path: Path) -> list[Row]:
    rows = list(leases.failed.values())
    check_columns(rows, {"task": str, "index": object, "error": object}, path)
    return rows


def first_failure(path: Path) -> str:
    """Return the number of failed samples and the first error as text, or "" if no sample failed."""
    failed = failed_samples(path)
    if not failed:
        return ""
    number = counted(len(failed), "sample")
    return f"{number} in {path} failed, the first by {failed[0]['error']}; --again makes them again"


def begun(folder: Path) -> bool:
    """Return True if the folder has a file of a run."""
    return (folder / STUDY).exists() or any(folder.glob(f".{STUDY}-*"))


def status(folder: Path, watch: bool = True) -> Iterator[str]:
    """Yield lines about each run: numbers of finished, planned and failed samples. The lines can be printed.

    With `watch`, the function also yields each error, the running workers, and an estimate of the remaining time.

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
        yield from (f"  {printable(line)}" for line in _watched(path, leases, len(planned - done)))


def _watched(path: Path, leases: Leases, left: int) -> Iterator[str]:
    for row in _failed(leases, path):
        yield f"failed: {row['task']}, number {row['index']}: {row['error']}"
    holders = leases.holders()
    for holder, alive in holders:
        who = f"process {holder.get('pid', '?')} of {holder.get('host', '?')}"
        dead = "" if alive else "; DEAD: its sample is taken over"
        yield f"under way: {who}, since {holder.get('since', '?')}{dead}"
    at_work, took = sum(alive for _, alive in holders), [_seconds(row) for row in load_rows(path) if study_unit(row)]
    if left and at_work and took:
        about = timedelta(seconds=round(left * sum(took) / len(took) / at_work))
        yield f"{about} to go with {at_work} at work"


def _seconds(row: Row) -> float:
    return float(sum(row.get("seconds", {}).values()))


ENGINES = ("processes", "ray")
_LOOK = 5.0
"""Number of seconds between two lines of progress of Ray actors."""
_RESTARTS = 5
"""Number of restarts of a killed actor."""


@dataclass(frozen=True)
class Launch:
    """Distribution of a command's work.

    Attributes:
        workers: number of processes including this process, or number of actors.
        engine: name from ENGINES.
        address: address of a running Ray cluster. "" starts a cluster on this machine.

    Raises:
        SpecError: if there is no worker, if the engine is unknown, or if an address is given without Ray.
    """

    workers: int = 1
    engine: str = ENGINES[0]
    address: str = ""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SpecError("workers", self.workers, "must be at least 1")
        check_choices("engine", (self.engine,), ENGINES)
        if self.address and self.engine != "ray":
            raise SpecError("address", self.address, "needs --engine ray, because the address is of a Ray cluster")

    @contextmanager
    def started(self, out: Path, device: str) -> Iterator[None]:
        """Context manager that runs additional processes of this command. Ray's actors finish before the block begins.

        The output of worker K goes to worker-K.log in the folder. Units of a dead worker are taken over and reported.
        """
        if self.engine == "ray":
            alone = [*sys.argv[1:], "--workers", "1", "--engine", ENGINES[0], "--address", ""]
            run_actors(alone, self.workers, self.address, out, device)
        with self._beside(out) if self.engine == ENGINES[0] and self.workers > 1 else nullcontext():
            yield

    @contextmanager
    def _beside(self, out: Path) -> Iterator[None]:
        """Start the processes with an equal share of the cores each, unless OMP_NUM_THREADS is set."""
        threads = str(max(1, (os.cpu_count() or 1) // self.workers))
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(int(threads))
        arguments = [word for word in sys.argv[1:] if word != "--again"]
        command = [sys.executable, "-P", "-m", "kvspec", *arguments, "--workers", "1"]
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": search_path()}
        children: dict[Path, subprocess.Popen[bytes]] = {}
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            for number in range(2, self.workers + 1):
                log = out / f"worker-{number}.log"
                file = files.enter_context(log.open("wb"))
                children[log] = subprocess.Popen(
                    command, env=environment, stdout=file, stderr=subprocess.STDOUT,
                )
            try:
                yield
            finally:
                for log, child in children.items():
                    if child.poll():
                        print(f"a worker ended with {child.returncode}: {log}", flush=True)
                    child.terminate()
                    child.wait()


class _Worker:
    """One process of the command with a separate model, on one GPU if the model uses a GPU."""

    def work(self, arguments: Sequence[str], folder: str, log: str) -> int:
        """Run the command in a folder and return the exit code. A second run continues the work of a killed run."""
        os.chdir(folder)
        sys.argv = ["kvspec", *arguments]
        with open(log, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file), \
                current_folder_last():
            try:
                run_module("kvspec", run_name="__main__")
            except SystemExit as ended:
                return int(ended.code or 0)
        return 0


@contextmanager
def _outside_of_folder() -> Iterator[None]:
    """Context manager in which the current folder is empty, unless this process already imports from its folder.

    Ray puts the current folder first in `sys.path` of all actors. A file of the folder, such as typing.py, would hide a
    module.
    """
    with TemporaryDirectory(prefix="kvspec-") as empty, nullcontext() if os.getcwd() in sys.path else chdir(empty):
        yield


def run_actors(arguments: Sequence[str], workers: int, address: str, out: Path, device: str) -> None:
    """Run the workers of a command on a cluster (without an address: on this machine) until all workers have ended.

    All machines must share the folder under the same path. Only the first worker repeats failed units.
    """
    import ray

    out.mkdir(parents=True, exist_ok=True)
    where = {"address": address} if address else {"address": "local", "num_cpus": workers}
    with _outside_of_folder():
        ray.init(**where, log_to_driver=False, include_dashboard=False)
    gpus = int(device.startswith("cuda"))
    kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=_RESTARTS, max_task_retries=_RESTARTS)(_Worker)
    actors, under_way = [kind.remote() for _ in range(workers)], {}
    for number, actor in enumerate(actors, 1):
        log = str((out / f"worker-{number}.log").resolve())
        words = [word for word in arguments if number == 1 or word != "--again"]
        under_way[actor.work.remote(words, os.getcwd(), log)] = log
    while under_way:
        done, _ = ray.wait(list(under_way), timeout=_LOOK)
        if begun(out):  # otherwise every actor still loads the model
            print(*status(out, watch=False), sep="\n", flush=True)
        for each in done:
            log = under_way.pop(each)
            try:
                code = ray.get(each)
            except ray.exceptions.RayError as error:
                code = type(error).__name__
            if code:
                print(f"a worker ended with {code}: {log}", flush=True)
    ray.shutdown()
