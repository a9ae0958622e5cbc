"""Results for people: tables in the terminal and on pages, and one picture per task."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from rich.table import Table

from models_integration.cache.atomic_file import publish_readable
from models_integration.studies.compare.plan import Plan
from models_integration.studies.compare.rules import verdict
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
from models_integration.studies.subject import Subject
from reference.statistics import wilson
from spec import SPEC_VERSION

__all__ = ["comparison_tables", "control_table", "draw", "failed_controls", "write_report"]

_COLUMNS_MOST = 4
"""Budgets beside each other in a picture; further ones stand below them."""


def comparison_tables(rows: Sequence[Row], width: int) -> list[Table]:
    """Accuracy by policy and budget: one table of all tasks, or one for each where the terminal is too narrow.

    The narrowest leave the sizes of the cache out: the files beside the results have them.
    """
    if not rows:
        return []
    title = f"Exact match of {rows[0]['n']} samples, and the slots that were stored meanwhile"
    whole = table_of(title, *_cells(rows))
    if fits(whole, width):
        return [whole]
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        about = f"{title_of(task)}: exact match of {rows[0]['n']} samples"
        headings, lines = _cells([row for row in rows if row["task"] == task], "exact match")
        table = table_of(about, headings, lines)
        few = [[line[0], line[1], line[3]] for line in lines]
        found.append(table if fits(table, width) else table_of(about, ["policy", "budget", "exact match"], few))
    return found


def _cells(rows: Sequence[Row], only: str = "") -> tuple[list[str], list[list[str]]]:
    """Headings, and a line per policy and budget. `only` heads the scores where there is one task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for policy, budget in dict.fromkeys((row["policy"], row["budget_requested"]) for row in rows):
        mine = {row["task"]: row for row in rows if (row["policy"], row["budget_requested"]) == (policy, budget)}
        some = next(iter(mine.values()))
        mean = sum(row["mean_cache"] for row in mine.values()) / len(mine)
        over = max(row["over_budget"] for row in mine.values())
        scores = [f"{mine[task]['accuracy']:.2f}" if task in mine else "" for task in tasks]
        lines.append([policy, budget, str(some["budget"]), *scores, f"{mean:.0f}", f"{over:.0f}" if over else ""])
    headings = ["policy", "budget", "B", *(only or title_of(task) for task in tasks), "mean cache"]
    if any(line[-1] for line in lines):
        return [*headings, "over B"], lines
    return headings, [line[:-1] for line in lines]


def control_table(rows: Sequence[Row]) -> Table:
    """The controls with what each must show."""
    headings, lines = _control_cells(rows)
    colour = {"holds": "[green]holds[/green]", "FAILS": "[red]FAILS[/red]"}
    table = table_of("Controls", headings, (), texts=2)
    for line in lines:
        table.add_row(*(colour.get(cell, cell) for cell in line))
    return table


def _control_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in rows:
        bound, passed = verdict(row).split("; ")
        share = f"{row['accuracy']:.2f} ({row['correct']}/{row['n']})"
        lines.append([row["policy"], title_of(row["task"]), share, bound, passed])
    return ["control", "task", "exact match", "must be", ""], lines


def failed_controls(rows: Sequence[Row]) -> list[str]:
    """The controls that do not show what they must, with their tasks."""
    return [f"{row['policy']} ({title_of(row['task'])})" for row in rows if verdict(row).endswith("FAILS")]


def write_report(rows: Sequence[Row], out: Path, plan: Plan, subject: Subject) -> list[Path]:
    """The plan's own files in a folder: rows as CSV, tables as Markdown, a picture of each task.

    Their names carry a digest of the plan, of the model and of the backend: another plan's stay as they are.
    """
    stem = f"comparison-{digest_of(plan, subject.name, subject.backend, SPEC_VERSION)}"
    about = f"{subject.name}, {plan.length} tokens, n = {plan.samples}, question '{plan.placement}'"
    measured, controls = ([row for row in rows if row["control"] is kind] for kind in (False, True))
    pages = [markdown_text(f"Exact match: {about}", *_cells(measured))] if measured else []
    if controls:
        pages.append(markdown_text("Controls", *_control_cells(controls)))
    written = [out / f"{stem}.csv", out / f"{stem}.md"]
    publish_readable(written[0], csv_text([{**row, **_interval(row)} for row in rows]).encode())
    publish_readable(written[1], "\n".join(pages).encode())
    for task in dict.fromkeys(row["task"] for row in measured):
        picture = out / f"{stem}-{task.replace(':', '.')}.png"
        draw([row for row in measured if row["task"] == task], picture, f"{title_of(task)}: {about}")
        written.append(picture)
    return written


def _interval(row: Row) -> dict[str, float]:
    return dict(zip(("low", "high"), wilson(row["correct"], row["n"]), strict=True))


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Exact match of one task: a panel per budget, a point with its Wilson interval per policy.

    What stores the whole context is a line in every panel.
    """
    limited = [row for row in rows if row["budget"] < row["length"]]
    whole = [row for row in rows if row["budget"] >= row["length"]]
    policies = list(dict.fromkeys(row["policy"] for row in limited or whole))
    budgets = list(dict.fromkeys((row["budget_requested"], row["budget"]) for row in limited or whole))
    across = min(_COLUMNS_MOST, len(budgets))
    down = ceil(len(budgets) / across)
    figure = new_figure(1.9 + 2.0 * across, 1.3 + down * (0.9 + 0.36 * len(policies)), title)
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    for panel, (requested, B) in zip(panels, budgets, strict=False):
        mine = [row for row in limited or whole if row["budget_requested"] == requested]
        shares(panel, policies, {row["policy"]: (row["accuracy"], *wilson(row["correct"], row["n"])) for row in mine})
        _lines(panel, whole)
        panel.set_title(f"budget {requested} (B = {B})", fontsize=9)
        panel.set_xlabel("exact match, 95 % interval", fontsize=8)
    for panel in panels[len(budgets) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncol=2, frameon=False, fontsize=8)
    save(figure, path)


def _lines(panel: Axes, whole: Sequence[Row]) -> None:
    for style, row in zip(("--", ":", "-."), whole, strict=False):
        panel.axvline(row["accuracy"], color="black", ls=style, lw=1, label=f"{row['policy']}: {row['accuracy']:.2f}")
