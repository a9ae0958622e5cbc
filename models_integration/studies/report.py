"""Terminal output of studies: progress, titles and tables."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["TITLES", "fits", "progress_bar", "table_of", "title_of"]

TITLES = {"needle": "Needle", "delayed_association": "Delayed association"}

_LINE_EVERY = 5.0
"""Number of seconds between two lines."""


@contextmanager
def progress_bar(console: Console, total: int, every: float = _LINE_EVERY) -> Iterator[Callable[[str], None]]:
    """Context manager that shows the progress of `total` parts. Call its value once per part, with the part's title.

    In a terminal, a bar is shown, otherwise a line every few seconds.
    """
    if not console.is_terminal:
        yield _Lines(console, total, every)
        return
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total)
        yield lambda what: progress.update(bar, advance=1, description=what)


class _Lines:
    """Progress as lines: at the first part, at the last part, and every few seconds."""

    def __init__(self, console: Console, total: int, every: float) -> None:
        self._console, self._total, self._every = console, total, every
        self._done, self._start, self._said, self._first = 0, time.monotonic(), -every, 0.0

    def __call__(self, what: str) -> None:
        self._done += 1
        spent = time.monotonic() - self._start
        self._first = self._first or spent
        if self._done in (1, self._total) or spent - self._said >= self._every:
            self._said = spent
            line = f"{self._done}/{self._total}  {what}"
            if self._done > 1:  # the first part includes loading and compilation
                each = (spent - self._first) / (self._done - 1)
                line += f"  {timedelta(seconds=round(each * (self._total - self._done)))} to go"
            self._console.print(line, highlight=False, soft_wrap=True)


def title_of(task: str) -> str:
    """Return the title of a task. The title of a user's task is the given name."""
    return TITLES.get(task, task.replace("_", " ").capitalize() if task.isidentifier() else task)


def table_of(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> Table:
    """Return a terminal table. The first `texts` columns (texts) may wrap, and all later columns (numbers) are not cut.

    Each word of a heading is on a separate line.
    """
    lines = list(lines)
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", pad_edge=False)
    for at, heading in enumerate(headings):
        if at < texts:
            table.add_column(heading, overflow="fold", min_width=7)
        else:
            widest = max((len(line[at]) for line in lines), default=0)
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True, min_width=widest)
    for line in lines:
        # rich would parse a bracket as a style.
        table.add_row(*(cell.replace("[", "\\[") for cell in line))
    return table


def fits(table: Table, width: int) -> bool:
    """Return True if a terminal with `width` columns shows all numbers of the table."""
    console = Console(width=10_000)
    return console.measure(table).minimum <= width
