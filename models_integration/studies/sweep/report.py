"""A sweep for people: one table, as text and as Markdown, and one picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from models_integration.studies.compare.report import TITLES
from models_integration.studies.results import Row
from models_integration.studies.sweep.plan import BASE

__all__ = ["against_base", "draw", "markdown", "sweep_table"]


def against_base(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Per row: samples that the variant got right and the base did not, and the other way round."""
    base = {row["task"]: row["outcomes"] for row in rows if row["variant"] == BASE}
    pairs = [list(zip(row["outcomes"], base[row["task"]], strict=True)) for row in rows]
    return [(pair.count((1, 0)), pair.count((0, 1))) for pair in pairs]


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line per variant: exact match with its interval, won and lost samples, mean cache."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    differences = against_base(rows)
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line, stored = [variant], []
        for row, (won, lost) in zip(rows, differences, strict=True):
            if row["variant"] == variant:
                line.append(f"{row['accuracy']:.2f} [{short(row['low'])} {short(row['high'])}]")
                line.append("" if variant == BASE else f"+{won} -{lost}")
                stored.append(row["mean_cache"])
        lines.append([*line, f"{sum(stored) / len(stored):.0f}"])
    pairs = [(TITLES.get(task, task), "won, lost") for task in tasks]
    return ["variant", *(heading for pair in pairs for heading in pair), "cache"], lines


def short(share: float) -> str:
    """Two digits, without the zero that every share but 1 begins with."""
    return f"{share:.2f}".removeprefix("0")


def sweep_table(rows: Sequence[Row]) -> Table:
    """The table of a terminal."""
    headings, lines = cells_of(rows)
    title = f"Exact match of {rows[0]['n']} samples, its 95 % interval; samples won and lost against {BASE}"
    table = Table(title=title, padding=0)
    for heading in headings:
        table.add_column(heading.replace(" ", "\n"), justify="left" if heading == "variant" else "right", no_wrap=True)
    for line in lines:
        # A bracket would be read as a style.
        table.add_row(*(cell.replace("[", "\\[") for cell in line))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The same table for a page."""
    headings, lines = cells_of(rows)
    every = [headings, ["---"] * len(headings), *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in every)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A panel per task, a point with its interval per variant; the base as a line."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    height = 1.2 + 0.3 * len(names)
    figure = Figure(figsize=(4.6 * len(tasks), height))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        mine = [row for row in rows if row["task"] == task]
        share = [row["accuracy"] for row in mine]
        error = [[row["accuracy"] - row["low"] for row in mine], [row["high"] - row["accuracy"] for row in mine]]
        panel.errorbar(share, range(len(mine)), xerr=error, fmt="o", capsize=3, lw=1)
        panel.axvline(next(row["accuracy"] for row in mine if row["variant"] == BASE), color="black", ls="--", lw=1)
        panel.set_title(TITLES.get(task, task), fontsize=11)
        panel.set_xlim(-0.03, 1.03)
        panel.set_xlabel("exact match")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
