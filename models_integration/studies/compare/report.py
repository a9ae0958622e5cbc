"""Results for people: tables in the terminal, and sections of a page."""

from collections.abc import Sequence

from rich.table import Table

from models_integration.studies.answers import SAMPLES
from models_integration.studies.compare.plan import FULL
from models_integration.studies.compare.rules import verdict
from models_integration.studies.page.elements import Html, note, section, table
from models_integration.studies.page.papers import Ours, beside_papers
from models_integration.studies.page.shares import Share, grouped, kept_of, shares_sections
from models_integration.studies.report import fits, table_of, title_of
from models_integration.studies.results import Row

__all__ = ["comparison_sections", "comparison_tables", "control_table", "failed_controls"]


def comparison_tables(rows: Sequence[Row], width: int) -> list[Table]:
    """Accuracy by policy and budget: one table of all tasks, or one for each where the terminal is too narrow.

    The narrowest leave the sizes of the cache out: the page has them.
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
        wide = table_of(about, headings, lines)
        few = [[line[0], line[1], line[3]] for line in lines]
        found.append(wide if fits(wide, width) else table_of(about, ["policy", "budget", "exact match"], few))
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
    shown = table_of("Controls", headings, (), texts=2)
    for line in lines:
        shown.add_row(*(colour.get(cell, cell) for cell in line))
    return shown


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


def comparison_sections(rows: Sequence[Row], samples: Sequence[Row]) -> list[Html]:
    """The sections of all comparisons in a folder: cells that share model, length, number of samples and so on.

    Args:
        rows: of the cells, oldest first.
        samples: of what the cells said, as `Run` stores them; without them nothing is paired.
    """
    found = []
    for about, group in grouped(rows, ("model", "backend", "length", "n", "seed", "placement", "spec_version")):
        measured, controls = ([row for row in group if row["control"] is kind] for kind in (False, True))
        said = _said(about, samples)
        shares = [
            Share(
                row["task"], row["policy"], row["budget_requested"], row["n"], row["correct"], kept_of(row),
                row["mean_cache"], said.get((row["task"], row["policy"], row["budget"]), ()),
                {"B": str(row["budget"]), "peak cache": str(row["peak_cache"]), "over B": str(row["over_budget"])},
            ) for row in measured
        ]
        failed = ", ".join(failed_controls(controls))
        found.append(section(
            f"Comparison: {about['model']}, {about['length']} tokens",
            note(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())),
            note(f"Controls that FAIL: {failed}." if failed else "", "warning"),
            note("" if controls else "No controls: nothing shows that the tasks measure retention.", "warning"),
            note("" if said else f"No samples in {SAMPLES}: nothing is paired.", "warning"),
            note("Comparisons store neither seconds nor bytes, depths nor evidence: kvspec study does."),
        ))
        found += shares_sections(shares, FULL, FULL)
        if controls:
            found.append(section("Controls", table("What must answer, or must not", *_control_cells(controls))))
        found.append(section("Beside the papers", beside_papers([
            Ours(title_of(task), task, {(one.name, one.budget): one.estimate for one in shares if one.task == task})
            for task in dict.fromkeys(one.task for one in shares)
        ])))
    return found


def _said(about: Row, samples: Sequence[Row]) -> dict[tuple[str, str, int], list[float]]:
    """Right or wrong by task, policy and B, of the samples of one comparison in their order."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in samples:
        if all(row[name] == value for name, value in about.items() if name != "n") and row["index"] < about["n"]:
            for cell in row["cells"]:
                found.setdefault((row["task"], cell["policy"], cell["budget"]), {})[row["index"]] = float(cell["right"])
    return {key: [right for _, right in sorted(own.items())] for key, own in found.items() if len(own) == about["n"]}
