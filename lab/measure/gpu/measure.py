"""Time and memory on the device, a backend that measures its stages, and the page with the results."""

import gc
import json
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch

from accelerated.triton_gpu.device import default_device
from lab import pages
from spec.backend import Backend, CrystalStages
from spec.records import CoAttention

START = time.perf_counter()


class PartTimeout(Exception):
    """Error if a part of the run exceeds its time limit."""


def say(text: str) -> None:
    """Print one line of progress, with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def synchronize() -> None:
    """Wait for the device."""
    if default_device().type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Context manager that raises PartTimeout after this time, as soon as Python code runs."""

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
    """Return the median milliseconds of a call after one warm-up.

    The times are from CUDA events, or from the clock if there is no GPU.
    """
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
    """Return the bytes in use before a call and at its peak, or None without a GPU."""
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
    """Wrapper that measures the stages of a backend, one by one. `backend` is the backend to pass on."""

    def __init__(self, backend: Backend) -> None:
        self._stages = backend.require_crystal()
        self.backend = replace(backend, crystal=cast(CrystalStages, self), prefill=None, decoding=None)
        self.seconds: dict[str, float] = defaultdict(float)
        self.given: tuple[Any, ...] = ()
        """Arguments of the last S1."""
        self.actual: CoAttention | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        stage = getattr(self._stages, name)

        def timed(*arguments: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            result = stage(*arguments)
            synchronize()
            self.seconds[name] += time.perf_counter() - start
            if name == "coattention":
                self.given, self.actual = arguments, result
            return result

        return timed


@dataclass(frozen=True)
class Figure:
    """Measured number and its goal. With `at_least`, the goal is a minimum."""

    what: str
    value: float | None
    unit: str
    goal: float | None = None
    aim: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Verdict on the goal: "met", "**missed**" or "not measured". Empty without a goal."""
        if self.goal is None:
            return ""
        if self.value is None:
            return "not measured"
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "met" if met else "**missed**"

    def cells(self) -> Sequence[str]:
        """Return a row of the page."""
        sign = ">=" if self.at_least else "<="
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{aim}"
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        return self.what, value, goal, self.verdict


@dataclass(frozen=True)
class Table:
    """Separate table with a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """Return the lines of the page."""
        return [f"## {self.title}", "", pages.table(self.columns, self.rows)]


@dataclass
class Report:
    """Report that is filled part by part, and can be written at any time."""

    header: dict[str, str]
    dry: bool
    parts: dict[str, str] = field(default_factory=dict)
    """Outcome of each part."""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, what: str, value: float | None, unit: str, goal: float | None = None, aim: float | None = None,
        at_least: bool = False,
    ) -> None:
        """Add a figure. A dry run has no goals."""
        figure = Figure(what, value, unit, *((None, None) if self.dry else (goal, aim)), at_least)
        print(f"    {' | '.join(figure.cells())}", flush=True)
        self.figures.append(figure)

    def page(self) -> str:
        """Return the report as Markdown."""
        title = "# Dry run: sizes are tiny, the figures say nothing" if self.dry else f"# {self.header['device']}"
        lines = [title, "", *(f"- {name}: {value}" for name, value in self.header.items()), ""]
        lines += [pages.table(["part", "outcome"], self.parts.items())]
        if self.figures:
            rows = [figure.cells() for figure in self.figures]
            lines += ["## Figures", "", pages.table(["what", "measured", "goal", ""], rows)]
        for table in self.tables:
            lines += table.lines()
        return "\n".join([*lines, *(f"- {note}" for note in self.notes), ""])

    def record(self) -> dict[str, Any]:
        """Return the report as data for programs."""
        figures = [{**asdict(figure), "verdict": figure.verdict.strip("*")} for figure in self.figures]
        return {**asdict(self), "figures": figures}

    def write(self, folder: Path, name: str) -> Path:
        """Write both files, and return the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
        page = folder / f"{name}.md"
        page.write_text(self.page(), encoding="utf-8")
        return page
