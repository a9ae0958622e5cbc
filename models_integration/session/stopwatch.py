"""Seconds by stage, also where a device works while the host goes on."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up what each stage takes; on CUDA between events of the device's queue, so that nobody waits meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this stage."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(self._device)
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((name, first, last))

    def read(self) -> dict[str, float]:
        """Seconds of each stage so far; waits for the device."""
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name] += first.elapsed_time(last) / 1e3
        self._events.clear()
        return dict(self._seconds)
