"""How far a command is that takes minutes: a bar in a terminal, elsewhere a line every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]

_EVERY = 5.0
"""Seconds between two lines."""


@contextmanager
def progress_bar(console: Console, total: int, every: float = _EVERY) -> Iterator[Callable[[str], None]]:
    """Progress of `total` parts; call what it gives once for each part, with what was done."""
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
