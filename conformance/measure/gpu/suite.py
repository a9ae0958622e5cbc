"""The conformance suite on the kernels as they are compiled for this device."""

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

from conformance.measure.gpu.measure import PartTimeout, say
from conformance.measure.gpu.models import Scale
from conformance.measure.gpu.report import Report
from conformance.paths import ROOT

WORKERS = 16  # compiling is the larger part of the time, and each worker compiles on a core of its own


def conformance(report: Report, scale: Scale, seconds: int) -> None:
    """Run pytest as often as the scale says, all within the time given.

    Raises:
        AssertionError: when a test fails.
        PartTimeout: when the time is over; the tests are ended.
    """
    stop = time.monotonic() + seconds
    spread = ["-n", str(min(WORKERS, os.cpu_count() or 1))] if find_spec("xdist") else []
    for chosen in scale.tests:
        # A warning of another library version is no failure of a kernel.
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--kvspec-profile", "few", *spread, *chosen]
        say(" ".join(command[1:]))
        code, last = _followed(command, stop - time.monotonic())
        report.notes.append(f"`pytest {' '.join(chosen)}`: {last}")
        if code:
            raise AssertionError(f"conformance is not green: {last}")


def _followed(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit code and last line of a command whose output is passed on as it comes."""
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        running.terminate()

    timer = threading.Timer(max(0.0, seconds), end)
    timer.start()
    last = "no output"
    try:
        with running.stdout as output:
            for line in output:
                print(f"    {line}", end="", flush=True)
                last = line.strip("= \n") or last
        code = running.wait()
    finally:
        timer.cancel()
        running.kill()
    if late.is_set():
        raise PartTimeout(f"the tests were not through after {seconds:.0f} s")
    return code, last
