"""Workers as actors of Ray. Ray places the workers, and leases in the shared folder distribute the units."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from runpy import run_module

import ray

from models_integration.studies.status import begun, status

__all__ = ["run_actors"]

_LOOK = 5.0
"""Number of seconds between two lines of progress."""
_RESTARTS = 5
"""Number of restarts of a killed actor."""


class _Worker:
    """One process of the command with a separate model, on one GPU if the model uses a GPU."""

    def work(self, arguments: Sequence[str], folder: str, log: str) -> int:
        """Run the command in a folder and return the exit code. A second run continues the work of a killed run."""
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv = ["kvspec", *arguments]
        with open(log, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                run_module("models_integration.cli", run_name="__main__")
            except SystemExit as ended:
                return int(ended.code or 0)
        return 0


def run_actors(arguments: Sequence[str], workers: int, address: str, out: Path, device: str) -> None:
    """Run the workers of a command on a cluster (without an address: on this machine) until all workers have ended.

    All machines must share the folder under the same path. Only the first worker repeats failed units.
    """
    out.mkdir(parents=True, exist_ok=True)
    where = {"address": address} if address else {"address": "local", "num_cpus": workers}
    ray.init(**where, log_to_driver=False, include_dashboard=False)
    gpus = int(device.startswith("cuda"))
    kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=_RESTARTS, max_task_retries=_RESTARTS)(_Worker)
    actors, under_way = [kind.remote() for _ in range(workers)], {}
    for number, actor in enumerate(actors, 1):
        log = str((out / f"worker-{number}.log").resolve())
        own = [word for word in arguments if number == 1 or word != "--again"]
        under_way[actor.work.remote(own, os.getcwd(), log)] = log
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
