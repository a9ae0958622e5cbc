"""More processes of the same command: they share its files of results, and each takes what nobody else holds."""

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
    """How a command's work is shared out.

    Attributes:
        workers: processes, this one among them; or actors.
        engine: one of ENGINES.
        address: of a Ray cluster that runs; "" starts one on this machine.

    Raises:
        SpecError: for no worker, an unknown engine, or an address without Ray.
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
        """Other processes of this command work while the block runs; actors of Ray are done when it begins.

        What they print goes to worker-K.log in the folder. What a dead one held, another takes over; it is named.
        """
        if self.engine == "ray":
            from models_integration.studies.ray_workers import run_actors

            alone = [*sys.argv[1:], "--workers", "1", "--engine", ENGINES[0], "--address", ""]
            run_actors(alone, self.workers, self.address, out, device)
        with self._beside(out) if self.engine == ENGINES[0] and self.workers > 1 else nullcontext():
            yield

    @contextmanager
    def _beside(self, out: Path) -> Iterator[None]:
        """The cores are shared out, unless OMP_NUM_THREADS says otherwise."""
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
