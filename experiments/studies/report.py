"""Numbers and terminal output of studies: estimates, the summary of samples by cell, progress, titles and tables."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from experiments.studies.answers import read_budget
from experiments.studies.evidence.kept import CONTROL_BOUNDS, FULL, control_tokens
from experiments.studies.results import Row
from experiments.tasks.registry import QUESTION_TASK, question_constants
from models_integration.cache.atomic_file import publish_readable
from reference.statistics import bootstrap, draws, mcnemar, wilson
from spec.arrays import Float64, Vector
from spec.errors import SpecError
from spec.printing import counted, printable, printable_lines
from spec.tables import csv_text, result_table

__all__ = [
    "NOTHING", "RESAMPLES", "SAME_CACHE", "SEED", "SIGNIFICANT", "TABLES", "Estimate", "Pairs", "budget_tokens",
    "control_cells", "control_table", "failed_controls", "fits", "fitting_tables", "format_p", "mean_of", "pairs_of",
    "progress_bar",
    "say", "share_of", "summary", "summary_tables", "table_of", "title_of", "verdict", "write_table",
]

SEED, RESAMPLES = 0, 2000
"""Seed and number of resamples of every bootstrap of a study."""
SIGNIFICANT = 0.05
"""Largest p value of a significant difference."""
SAME_CACHE = 0.01
"""Largest relative difference of the numbers of prompt tokens that two compared policies keep."""


class Estimate(NamedTuple):
    """Value with a 95 % interval and the number of samples. A missing number is NaN."""

    value: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Return True if the value is not NaN."""
        return not math.isnan(self.value)

    def text(self, form: str = ".2f", interval: bool = True) -> str:
        """Return value and interval as text, with numbers in this format, or "" without a value."""
        if not self.known:
            return ""
        value, known = f"{self.value:{form}}", interval and not math.isnan(self.low)
        return f"{value} [{self.low:{form}}, {self.high:{form}}]" if known else value

    def __str__(self) -> str:
        return self.text()


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


class Pairs(NamedTuple):
    """Comparison of two policies on the same samples: gain of the first, samples won and lost, McNemar's exact p."""

    difference: Estimate
    won: int
    lost: int
    p: float


def format_p(p: float, bound: bool = False) -> str:
    """Return a p value as text, never as 0.0000. With `bound`, the text states that p is at most this value."""
    text = "< 0.0001" if p < 0.0001 else f"{p:.4f}"
    return f"≤ {text.removeprefix('< ')}" if bound else text


def share_of(correct: int, n: int) -> Estimate:
    """Return the fraction of right answers with Wilson's interval."""
    return Estimate(correct / n, *wilson(correct, n), n)


def pairs_of(first: Sequence[float], second: Sequence[float]) -> Pairs:
    """Return the paired difference of two vectors of right (1) and wrong (0) answers. One sample gives no interval."""
    differences = np.subtract(first, second, dtype=np.float64)
    won, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return Pairs(mean_of(differences), won, lost, mcnemar(lost, won))


def mean_of(values: Float64[Vector, " n"], resamples: int = RESAMPLES) -> Estimate:
    """Return the mean of values with a bootstrap interval. One value gives no interval."""
    n, low, high = len(values), math.nan, math.nan
    if n > 1:
        low, high, _ = bootstrap(values, draws(n, resamples, SEED))
    return Estimate(float(values.mean()), low, high, n)


_LINE_EVERY = 5.0
"""Number of seconds between two lines."""
_SILENT = 2.0
"""Number of seconds without a display of progress."""


def say(text: str, console: Console | None = None) -> None:
    """Print a text without markup and control characters, and let the terminal wrap the lines."""
    (console or Console()).print(printable_lines(text), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(
    console: Console, total: int, every: float = _LINE_EVERY, after: float = _SILENT,
) -> Iterator[Callable[[str], None]]:
    """Context manager that shows the progress of `total` parts.

    Call the yielded function once for each part, with the title of the part.

    In a terminal, a bar is shown, otherwise a line every few seconds. Nothing is shown in the first `after` seconds.
    """
    if not console.is_terminal:
        yield _Lines(console, total, every, after)
        return
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    bar = progress.add_task("reads the first prompt", total=total)
    start = threading.Timer(after, progress.start)
    start.start()
    try:
        yield lambda what: progress.update(bar, advance=1, description=escape(printable(what)))
    finally:
        start.cancel()
        start.join()
        progress.stop()


class _Lines:
    """Progress as lines: at the first part, at the last part, and every few seconds."""

    def __init__(self, console: Console, total: int, every: float, after: float) -> None:
        self._console, self._total, self._every, self._after = console, total, every, after
        self._done, self._start, self._printed, self._first = 0, time.monotonic(), -every, 0.0

    def __call__(self, what: str) -> None:
        self._done += 1
        spent = time.monotonic() - self._start
        self._first = self._first or spent
        if spent >= self._after and (self._done in (1, self._total) or spent - self._printed >= self._every):
            self._printed = spent
            line = f"{self._done}/{self._total}  {what}"
            if self._done > 1:  # the first part includes loading and compilation
                each = (spent - self._first) / (self._done - 1)
                line += f"  {timedelta(seconds=round(each * (self._total - self._done)))} to go"
            say(line, self._console)


def title_of(task: str) -> str:
    """Return the title of a task.

    The title of a user's task is its name. The title of your own questions is the file and the grade.
    """
    if task.startswith(f"{QUESTION_TASK}("):
        with suppress(SpecError):  # rows of other people can have any text
            named = question_constants(task)
            return f"{named['file']} ({named['grade']})" if "grade" in named else str(named["file"])
    return task.replace("_", " ").capitalize() if task.isidentifier() else task


def table_of(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> Table:
    """Return a terminal table. The first `texts` columns (texts) may wrap, and all later columns (numbers) are not cut.

    Each word of a heading is on a separate line.
    """
    lines = [[printable(cell) for cell in line] for line in lines]
    above = Text(printable(title))
    table = Table(title=above, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", pad_edge=False)
    for at, heading in enumerate(headings):
        if at < texts:
            table.add_column(Text(printable(heading)), overflow="fold", min_width=7)
        else:
            widest = max((len(line[at]) for line in lines), default=0)
            words = Text(printable(heading).replace(" ", "\n"))
            table.add_column(words, justify="right", no_wrap=True, min_width=widest)
    for line in lines:
        table.add_row(*map(Text, line))  # rich would parse brackets in a str as a style
    return table


def fits(table: Table, width: int) -> bool:
    """Return True if a terminal with `width` columns shows all numbers of the table."""
    console = Console(width=10_000)
    return console.measure(table).minimum <= width


def fitting_tables(
    title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], width: int, texts: int = 1,
) -> list[Table]:
    """Return a terminal table in as many pieces as the width needs, so that no number is cut.

    Each piece has the first `texts` columns, and at least one more column.
    """
    pieces = [[*range(texts)]]
    for at in range(texts, len(headings)):
        wider = [*pieces[-1], at]
        if len(pieces[-1]) > texts and not fits(table_of(title, *_columns(headings, lines, wider), texts), width):
            pieces.append([*range(texts), at])
        else:
            pieces[-1] = wider
    more = [f" (part {part} of {len(pieces)})" * (len(pieces) > 1) for part in range(1, len(pieces) + 1)]
    return [
        table_of(f"{title}{part}", *_columns(headings, lines, piece), texts)
        for piece, part in zip(pieces, more, strict=True)
    ]


def _columns(
    headings: Sequence[str], lines: Sequence[Sequence[str]], chosen: Sequence[int],
) -> tuple[list[str], list[list[str]]]:
    return [headings[at] for at in chosen], [[line[at] for at in chosen] for line in lines]


TABLES = (".csv", ".tex")
"""Endings of the names of table files."""
_ABOUT = ("task", "length", "placement", "seed", "model", "backend", "spec_version")


def summary(rows: Iterable[Row]) -> list[Row]:
    """Return rows of `ResultTable`: one for each policy or control, budget, task, length, placement, seed and model.

    Samples without a score (such as text continuation) and the cell without context are left out.
    """
    groups: dict[tuple[object, ...], list[tuple[Row, Row]]] = {}
    for row in rows:
        for cell in row["cells"]:
            if cell["right"] is not None and cell["budget"] != "0":
                key = *(row[name] for name in _ABOUT), cell["policy"], cell["budget"]
                groups.setdefault(key, []).append((row, cell))
    return [_counted(pairs) for pairs in groups.values()]


def _counted(pairs: Sequence[tuple[Row, Row]]) -> Row:
    (row, first), n = pairs[0], len(pairs)
    policy, budget, control = first["policy"], first["budget"], first["policy"] in CONTROL_BOUNDS
    B = control_tokens(budget, row["length"]) if control else read_budget(budget).tokens(row["length"])
    kept = [math.ceil(float(np.mean(cell["kept"]))) for _, cell in pairs]
    allowed = [B if control else budget_tokens(budget, each) for each, _ in pairs]
    right = float(sum(cell["right"] for _, cell in pairs))
    return {
        **{name: row[name] for name in _ABOUT}, "policy": policy, "budget_requested": budget,
        "backend": first.get("backend", row["backend"]),
        "budget": min(B, row["length"]), "n": n, "control": control, "correct": right, "accuracy": right / n,
        "mean_kept": sum(kept) / n, "mean_cache": sum(cell["mean_cache"] for _, cell in pairs) / n,
        "peak_cache": max(cell["peak_cache"] for _, cell in pairs),
        "over_budget": max(0, *(one - most for one, most in zip(kept, allowed, strict=True))),
    }


def budget_tokens(budget: str, row: Row) -> int:
    """Return B of a sample's prompt, which can include the question. Rows before version 0.4 have no better data."""
    return read_budget(budget).tokens(int(row.get("prompt_tokens") or row["length"]))


def summary_tables(rows: Sequence[Row], width: int) -> list[Table]:
    """Return tables of accuracy by policy and budget, for each model, length, placement and seed.


    If the terminal is too narrow, there is one table per task. If a table per task is too wide, the numbers of tokens
    are shown only for policies that exceed their budget.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in ("model", "length", "placement", "seed")), []).append(row)
    result = []
    for about, group in groups.items():
        more = f": {', '.join(map(str, about))}" if len(groups) > 1 else ""
        result += _tables_of(group, width, more)
    return result


def _tables_of(rows: Sequence[Row], width: int, more: str) -> list[Table]:
    counts = sorted(row["n"] for row in rows)
    n = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    title = f"Share of right answers, {counted(n, 'sample')} of each task, with 95 % interval{more}"
    whole = table_of(title, *_cells(rows))
    if fits(whole, width):
        return [whole]
    result = []
    for task in dict.fromkeys(row["task"] for row in rows):
        about = f"{title_of(task)}: share of right answers, {counted(n, 'sample')}, with 95 % interval{more}"
        headings, lines = _cells([row for row in rows if row["task"] == task], "right answers")
        wide = table_of(about, headings, lines)
        short = [[*line[:3], line[3].partition(" ")[0]] for line in lines]
        # A line has a fifth cell if a policy exceeds its budget.
        few = [[one[0], f"{one[1]} ({one[2]})" if any(line[4:]) else one[1], one[3]]
               for one, line in zip(short, lines, strict=True)]
        forms = wide, table_of(about, headings[:4], short), table_of(about, ["policy", "budget", "right answers"], few)
        result.append(next((form for form in forms if fits(form, width)), forms[-1]))
    return result


def _cells(rows: Sequence[Row], only: str = "") -> tuple[list[str], list[list[str]]]:
    """Return headings, and a line per policy and budget. With one task, `only` is the heading of the scores."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    names = list(dict.fromkeys(row["policy"] for row in rows))
    cells = sorted(
        dict.fromkeys((row["policy"], row["budget_requested"]) for row in rows),
        key=lambda cell: (cell[0] == FULL, names.index(cell[0])),
    )
    for policy, budget in cells:
        mine = {row["task"]: row for row in rows if (row["policy"], row["budget_requested"]) == (policy, budget)}
        kept, asked = (fmean(row[name] for row in mine.values()) for name in ("mean_kept", "budget"))
        over = max(row["over_budget"] for row in mine.values())
        scores = [str(_share(mine[task])) if task in mine else "" for task in tasks]
        lines.append([policy, budget, f"{kept:.0f} of {asked:.0f}", *scores, f"{over:.0f}" if over else ""])
    headings = ["policy", "budget", "tokens kept, of budget", *(only or title_of(task) for task in tasks)]
    if any(line[-1] for line in lines):
        return [*headings, "over budget"], lines
    return headings, [line[:-1] for line in lines]


def _share(row: Row) -> Estimate:
    """Return the accuracy with Wilson's interval, or without an interval if scores are partial."""
    correct, n = row["correct"], row["n"]
    interval = wilson(round(correct), n) if correct == round(correct) else (np.nan, np.nan)
    return Estimate(row["accuracy"], *interval, n)


def verdict(row: Row) -> str:
    """Return the bound of a control, and whether it holds, such as "<= 0.05; holds"."""
    relation, bound = CONTROL_BOUNDS[row["policy"]]
    holds = row["accuracy"] <= bound if relation == "<=" else row["accuracy"] >= bound
    return f"{relation} {bound}; {'holds' if holds else 'FAILS'}"


def control_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table that shows for each control and task whether the bound holds."""
    lines = []
    for row in rows:
        bound, passed = verdict(row).split("; ")
        share = f"{row['accuracy']:.2f} ({row['correct']:.0f}/{row['n']})"
        lines.append([row["policy"], title_of(row["task"]), share, bound, passed])
    return ["control", "task", "right answers", "must be", ""], lines


def control_table(rows: Sequence[Row]) -> Table:
    """Return the table of controls with bounds."""
    headings, lines = control_cells(rows)
    colour = {"holds": "green", "FAILS": "red"}
    shown = table_of("Controls: does the task measure what is kept?", headings, (), texts=2)
    for line in lines:
        *cells, passed = map(printable, line)
        shown.add_row(*map(Text, cells), Text(passed, colour[passed]))
    return shown


def failed_controls(rows: Sequence[Row]) -> list[str]:
    """Return the controls whose bounds do not hold, with the tasks."""
    return [f"{row['policy']} ({title_of(row['task'])})" for row in rows if verdict(row).endswith("FAILS")]


def write_table(rows: Sequence[Row], recoveries: Sequence[float], path: Path) -> None:
    """Write the rows of `summary` to a file with an ending in `TABLES`.

    Further columns are Wilson's interval of each accuracy, and the recoveries. Your own questions have a short title as
    the name of the task.

    Raises:
        SpecError: if there are no rows.
    """
    if not rows:
        raise SpecError("table", str(path), "would be empty, because no sample has a result")
    frame = result_table(rows)
    frame["low"], frame["high"] = zip(*(_share(row)[1:3] for row in rows), strict=True)
    frame["recovery"] = recoveries
    frame["task"] = [title_of(task) if task.startswith(f"{QUESTION_TASK}(") else task for task in frame["task"]]
    if path.suffix == ".csv":
        text = csv_text(frame)
    else:
        text = "% Written by kvspec.\n" + frame.to_latex(index=False, float_format="%.3f", na_rep="", escape=True)
    publish_readable(path, text.encode())
