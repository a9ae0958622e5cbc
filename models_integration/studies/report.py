"""What studies show of themselves: how far they are, titles, files that belong to one plan, tables and pictures."""

import csv
import hashlib
import io
import json
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from models_integration.cache.atomic_file import publish_readable

__all__ = [
    "TITLES", "csv_text", "digest_of", "fits", "markdown_text", "new_figure", "progress_bar", "save", "shares",
    "table_of", "title_of", "wrapped_name",
]

TITLES = {"needle": "Needle", "delayed_association": "Delayed association"}

_INCH_LETTERS = 11
"""Letters of a title in an inch."""
_LINE_EVERY = 5.0
"""Seconds between two lines."""


@contextmanager
def progress_bar(console: Console, total: int, every: float = _LINE_EVERY) -> Iterator[Callable[[str], None]]:
    """Progress of `total` parts; call what it gives once for each part, with what was done.

    A bar in a terminal, elsewhere a line every few seconds.
    """
    if not console.is_terminal:
        yield _Lines(console, total, every)
        return
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total)
        yield lambda what: progress.update(bar, advance=1, description=what)


class _Lines:
    """One line at the first part, at the last, and every few seconds between them."""

    def __init__(self, console: Console, total: int, every: float) -> None:
        self._console, self._total, self._every = console, total, every
        self._done, self._start, self._said = 0, time.monotonic(), -every

    def __call__(self, what: str) -> None:
        self._done += 1
        spent = time.monotonic() - self._start
        if self._done in (1, self._total) or spent - self._said >= self._every:
            self._said = spent
            left = timedelta(seconds=round(spent / self._done * (self._total - self._done)))
            self._console.print(f"{self._done}/{self._total}  {what}  {left} to go", highlight=False, soft_wrap=True)


def title_of(task: str) -> str:
    """A task's name for people; a user's own as it was given."""
    return TITLES.get(task, task.replace("_", " ").capitalize() if task.isidentifier() else task)


def digest_of(plan: object, *more: str) -> str:
    """8 hexadecimal digits in the names of a plan's files: no other plan writes over them."""
    return hashlib.sha256(json.dumps([repr(plan), *more]).encode()).hexdigest()[:8]


def wrapped_name(name: str, letters: int = 20) -> str:
    """A long name on several lines, broken at its hyphens."""
    return "\n".join(textwrap.wrap(name, letters, break_on_hyphens=True))


def table_of(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> Table:
    """A table of a terminal: the first columns, so many texts, may wrap; of the figures behind them none is cut.

    Headings stand word under word.
    """
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", pad_edge=False)
    for at, heading in enumerate(headings):
        if at < texts:
            table.add_column(heading, overflow="fold", min_width=7)
        else:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for line in lines:
        # A bracket would be read as a style.
        table.add_row(*(cell.replace("[", "\\[") for cell in line))
    return table


def fits(table: Table, width: int) -> bool:
    """Whether a terminal of that many columns shows every figure of it."""
    console = Console(width=10_000)
    return console.measure(table).minimum <= width


def markdown_text(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for a page, under its title."""
    every = [headings, ["---"] * len(headings), *lines]
    return f"{title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in every)


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same columns, for a spreadsheet."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure of inches, with a title that wraps."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(width * _INCH_LETTERS)), fontsize=10)
    return figure


def shares(panel: Axes, names: Sequence[str], values: Mapping[str, tuple[float, float, float]]) -> None:
    """A point with its interval for each name, by its share, low and high; the share beside it."""
    for at, name in enumerate(names):
        if name not in values:
            continue
        share, low, high = values[name]
        panel.errorbar([share], [at], xerr=[[share - low], [high - share]], fmt="o", color="C0", ms=4, capsize=3, lw=1)
        panel.annotate(
            f"{share:.2f}", (share, at), (0, 5), textcoords="offset points", ha="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    panel.set_yticks(range(len(names)), [wrapped_name(name) for name in names], fontsize=8)
    panel.set_ylim(len(names) - 0.4, -0.7)
    panel.set_xlim(-0.08, 1.08)
    panel.set_xticks([0, 0.5, 1])
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="y", color="0.9", lw=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """Write a picture, whole or not at all."""
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    publish_readable(path, file.getvalue())
    return path
