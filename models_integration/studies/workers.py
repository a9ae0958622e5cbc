"""More processes of the same command: they share its files of results, and each takes what nobody else holds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console

__all__ = ["beside"]


@contextmanager
def beside(workers: int, out: Path, console: Console) -> Iterator[None]:
    """`workers` - 1 more of this process, while the block runs; what they print goes to worker-K.log in the folder.

    The cores are shared out, unless OMP_NUM_THREADS says otherwise. A worker that dies is named; what it held, another
    one takes over.
    """
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(int(threads))
    command = [sys.executable, "-m", "models_integration.cli", *sys.argv[1:], "--workers", "1"]
    children: dict[Path, subprocess.Popen[bytes]] = {}
    with ExitStack() as files:
        for number in range(2, workers + 1):
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
                    console.print(f"a worker ended with {child.returncode}: {log}", highlight=False, soft_wrap=True)
                child.terminate()
                child.wait()
