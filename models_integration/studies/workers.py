"""Additional processes of the same command. The processes share the results files, and take units by leases."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["ENGINES", "Launch"]

ENGINES = ("processes", "ray")


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
            from models_integration.studies.ray_workers import run_actors

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
        command = [sys.executable, "-m", "models_integration.cli", *arguments, "--workers", "1"]
        children: dict[Path, subprocess.Popen[bytes]] = {}
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            for number in range(2, self.workers + 1):
                log = out / f"worker-{number}.log"
                file = files.enter_context(log.open("wb"))
                children[log] = subprocess.Popen(
                    command, env={"OMP_NUM_THREADS": threads, **os.environ}, stdout=file, stderr=subprocess.STDOUT,
                )
            try:
                yield
            finally:
                for log, child in children.items():
                    if child.poll():
                        print(f"a worker ended with {child.returncode}: {log}", flush=True)
                    child.terminate()
                    child.wait()
