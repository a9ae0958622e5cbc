"""A sweep for people: tables, as text, JSON, CSV and Markdown, and a picture per task."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from models_integration.cache.atomic_file import publish_readable
from models_integration.studies.report import (
    csv_text,
    digest_of,
    fits,
    markdown_text,
    new_figure,
    save,
    shares,
    table_of,
    title_of,
)
from models_integration.studies.results import Row
from models_integration.studies.sweep.plan import BASE, Plan
from spec import SPEC_VERSION

__all__ = ["against_base", "draw", "markdown", "sweep_tables", "write_report"]


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
    pairs = [(title_of(task), "won, lost") for task in tasks]
    return ["variant", *(heading for pair in pairs for heading in pair), "cache"], lines


def short(share: float) -> str:
    """Two digits, without the zero that every share but 1 begins with."""
    return f"{share:.2f}".removeprefix("0")


def sweep_tables(rows: Sequence[Row], width: int) -> list[Table]:
    """One table of all tasks, or one for each where a terminal is too narrow for that."""
    title = f"Exact match of {rows[0]['n']} samples, its 95 % interval; samples won and lost against {BASE}"
    whole = table_of(title, *cells_of(rows))
    if fits(whole, width):
        return [whole]
    tasks = dict.fromkeys(row["task"] for row in rows)
    return [table_of(title, *cells_of([row for row in rows if row["task"] == task])) for task in tasks]


def markdown(rows: Sequence[Row], title: str) -> str:
    """The same table for a page."""
    return markdown_text(title, *cells_of(rows))


def write_report(rows: Sequence[Row], out: Path, plan: Plan, model: str, title: str) -> list[Path]:
    """The plan's own files in a folder: rows as JSON and CSV, the table as Markdown, a picture of each task.

    Their names carry a digest of the plan and of the model: another plan's stay as they are.
    """
    stem = f"sweep-{plan.grid}-{digest_of(plan, model, rows[0]['backend'], SPEC_VERSION)}"
    texts = {".json": json.dumps(rows, indent=1) + "\n", ".csv": csv_text(rows), ".md": markdown(rows, title)}
    written = [out / f"{stem}{suffix}" for suffix in texts]
    for path, text in zip(written, texts.values(), strict=True):
        publish_readable(path, text.encode())
    for task in dict.fromkeys(row["task"] for row in rows):
        picture = out / f"{stem}-{task.replace(':', '.')}.png"
        draw([row for row in rows if row["task"] == task], picture, f"{title_of(task)}. {title}")
        written.append(picture)
    return written


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A point with its interval per variant of one task; the base as a line."""
    names = [row["variant"] for row in rows]
    figure = new_figure(5.2, 1.4 + 0.36 * len(names), title)
    panel = figure.subplots()
    shares(panel, names, {row["variant"]: (row["accuracy"], row["low"], row["high"]) for row in rows})
    base = next(row["accuracy"] for row in rows if row["variant"] == BASE)
    panel.axvline(base, color="black", ls="--", lw=1, label=f"{BASE}: {base:.2f}")
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    panel.set_xlabel("exact match, 95 % interval", fontsize=8)
    save(figure, path)
