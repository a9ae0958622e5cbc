"""Time and memory on the device, a backend whose stages are timed as they run, and the page of what was measured."""

import gc
import json
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
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


@dataclass(frozen=True)
class Figure:
    """One measured number and what it should be; `at_least` turns the goal round."""

    what: str
    value: float | None
    unit: str
    goal: float | None = None
    aim: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.goal is None:
            return ""
        if self.value is None:
            return "not measured"
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "met" if met else "**missed**"

    def line(self) -> str:
        """A row of the page."""
        sign = ">=" if self.at_least else "<="
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{aim}"
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        return f"| {self.what} | {value} | {goal} | {self.verdict} |"


@dataclass(frozen=True)
class Table:
    """A table of its own, under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """As the page has it."""
        body = [self.columns, ("---",) * len(self.columns), *self.rows]
        return [f"## {self.title}", "", *(f"| {' | '.join(row)} |" for row in body), ""]


@dataclass
class Report:
    """Filled part by part; it can be written at any time."""

    header: dict[str, str]
    dry: bool
    parts: dict[str, str] = field(default_factory=dict)
    """What became of each part."""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, what: str, value: float | None, unit: str, goal: float | None = None, aim: float | None = None,
        at_least: bool = False,
    ) -> None:
        """Note a figure; a dry run has no goals."""
        figure = Figure(what, value, unit, *((None, None) if self.dry else (goal, aim)), at_least)
        print(f"    {figure.line()}", flush=True)
        self.figures.append(figure)

    def page(self) -> str:
        """Markdown."""
        title = "# Dry run: sizes are tiny, the figures say nothing" if self.dry else f"# {self.header['device']}"
        lines = [title, "", *(f"- {name}: {value}" for name, value in self.header.items()), ""]
        lines += ["| part | outcome |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in self.parts.items()), ""]
        if self.figures:
            lines += ["## Figures", "", "| what | measured | goal | |", "| --- | --- | --- | --- |"]
            lines += [*(figure.line() for figure in self.figures), ""]
        for table in self.tables:
            lines += table.lines()
        return "\n".join([*lines, *(f"- {note}" for note in self.notes), ""])

    def record(self) -> dict[str, Any]:
        """The same for programs."""
        figures = [{**asdict(figure), "verdict": figure.verdict.strip("*")} for figure in self.figures]
        return {**asdict(self), "figures": figures}

    def write(self, folder: Path, name: str) -> Path:
        """Both files; returns the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
        page = folder / f"{name}.md"
        page.write_text(self.page(), encoding="utf-8")
        return page
