"""A sweep for people: tables in the terminal, and sections of a page."""

from collections.abc import Sequence

from rich.table import Table

from models_integration.studies.page.elements import Html, note, section
from models_integration.studies.page.shares import Share, grouped, kept_of, shares_sections
from models_integration.studies.report import fits, table_of, title_of
from models_integration.studies.results import Row
from models_integration.studies.sweep.plan import BASE

__all__ = ["against_base", "sweep_sections", "sweep_tables"]


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


def sweep_sections(rows: Sequence[Row]) -> list[Html]:
    """The sections of all sweeps in a folder."""
    found = []
    for about, group in grouped(rows, ("grid", "model", "backend", "length", "budget", "n", "seed", "spec_version")):
        shares = [
            Share(
                row["task"], row["variant"], row["budget_requested"], row["n"], row["correct"], kept_of(row),
                row["mean_cache"], row["outcomes"], {"B": str(row["budget"]), "most kept": str(row["most_kept"])},
            ) for row in group
        ]
        found.append(section(
            f"Sweep: {about['grid']}, {about['model']}, {about['length']} tokens",
            note(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())),
            note(f"Variants of {BASE} on the same samples. Sweeps have no controls: kvspec compare and study do."),
        ))
        found += shares_sections(shares, BASE)
    return found
