"""Time and memory on the device, progress, and a backend whose stages are timed as they run."""

import gc
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import torch

from accelerated.triton_gpu.device import default_device
from spec.backend import Backend, CrystalStages
from spec.records import CoAttention

START = time.perf_counter()


class PartTimeout(Exception):
    """A part of the run took longer than it may."""


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def synchronize() -> None:
    """Wait for the device."""
    if default_device().type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise PartTimeout inside the block once it has run so long (as soon as Python has its turn)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise PartTimeout(f"stopped at its limit of {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """Median milliseconds of a call, after one to warm up: by CUDA events, or by the clock where there is no GPU."""
    run()
    return statistics.median(_milliseconds(run) for _ in range(rounds))


def _milliseconds(run: Callable[[], object]) -> float:
    synchronize()
    if default_device().type != "cuda":
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    run()
    last.record()
    synchronize()
    return float(first.elapsed_time(last))


def peak_bytes(run: Callable[[], object]) -> tuple[int, int] | None:
    """Bytes in use before a call, and at its peak; None where there is no GPU."""
    if default_device().type != "cuda":
        run()
        return None
    synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronize()
    return before, torch.cuda.max_memory_allocated()




class Watch:
    """Stands before a backend's stages; `backend` is what to hand on."""

    def __init__(self, backend: Backend) -> None:
        self._stages = backend.require_crystal()
        self.backend = replace(backend, crystal=cast(CrystalStages, self))
        self.seconds: dict[str, float] = defaultdict(float)
        self.given: tuple[Any, ...] = ()
        """The arguments of the last S1."""
        self.found: CoAttention | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        stage = getattr(self._stages, name)

        def timed(*arguments: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            result = stage(*arguments)
            synchronize()
            self.seconds[name] += time.perf_counter() - start
            if name == "coattention":
                self.given, self.found = arguments, result
            return result

        return timed
