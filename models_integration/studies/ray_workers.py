"""The same workers as actors of Ray: it says where they run, the leases in the shared folder who makes what."""

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
"""Seconds between two lines of progress."""
_RESTARTS = 5
"""How often an actor that was killed begins again."""


class _Worker:
    """One process of the command, with a model of its own, on one GPU where the model is on one."""

    def work(self, arguments: Sequence[str], folder: str, log: str) -> int:
        """Run the command, started in a folder; its exit code. A second run goes on where a first was killed."""
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
    """Run a command's workers on a cluster, or on this machine where there is no address, until each has ended.

    The folder must be shared by all machines, under the same name. Only the first makes again what has failed.
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
        if begun(out):  # else each actor still loads its model
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
