"""Results for people: a table in the terminal and one picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from models_integration.studies.compare.rules import verdict
from models_integration.studies.results import Row
from reference.statistics import wilson

__all__ = ["TITLES", "comparison_table", "control_table", "draw"]

TITLES = {"needle": "Needle", "delayed_association": "Delayed association"}


def comparison_table(rows: Sequence[Row]) -> Table:
    """Accuracy of each policy on each task, one line per policy and budget."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    table = Table(title=f"Exact match of {rows[0]['n']} samples, and the slots that were stored meanwhile")
    table.add_column("policy", no_wrap=True)
    for heading in ("budget", "B", *(TITLES.get(task, task) for task in tasks), "mean cache", "over B"):
        table.add_column(heading, justify="right")
    for policy, budget in dict.fromkeys((row["policy"], row["budget_requested"]) for row in rows):
        mine = {row["task"]: row for row in rows if (row["policy"], row["budget_requested"]) == (policy, budget)}
        some = next(iter(mine.values()))
        mean = sum(row["mean_cache"] for row in mine.values()) / len(mine)
        over = max(row["over_budget"] for row in mine.values())
        accuracy = [f"{mine[task]['accuracy']:.2f}" if task in mine else "" for task in tasks]
        table.add_row(policy, budget, str(some["budget"]), *accuracy, f"{mean:.0f}", f"{over:.0f}" if over else "")
    return table


def control_table(rows: Sequence[Row]) -> Table:
    """The controls with what each must show."""
    table = Table(title="Controls")
    for heading in ("control", "task", "exact match", "must be", ""):
        table.add_column(heading)
    for row in rows:
        bound, passed = verdict(row).split("; ")
        colour = "green" if passed == "holds" else "red"
        task = TITLES.get(row["task"], row["task"])
        share = f"{row['accuracy']:.2f} ({row['correct']}/{row['n']})"
        table.add_row(row["policy"], task, share, bound, f"[{colour}]{passed}[/{colour}]")
    return table


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Exact match by policy and budget, a panel per task: bars with Wilson intervals, the full cache as a line."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(4.6 * len(tasks), 3.8))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        _panel(panel, [row for row in rows if row["task"] == task])
        panel.set_title(TITLES.get(task, task), fontsize=11)
    panels[0][0].set_ylabel("exact match")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.suptitle(title, fontsize=12)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=150)


def _panel(panel: Axes, rows: Sequence[Row]) -> None:
    limited = [row for row in rows if row["budget"] < row["length"]]
    policies = list(dict.fromkeys(row["policy"] for row in limited))
    budgets = list(dict.fromkeys(row["budget_requested"] for row in limited))
    width = 0.8 / max(1, len(policies))
    for i, policy in enumerate(policies):
        mine = [row for row in limited if row["policy"] == policy]
        centres = [budgets.index(row["budget_requested"]) + (i - (len(policies) - 1) / 2) * width for row in mine]
        low, high = zip(*(wilson(row["correct"], row["n"]) for row in mine), strict=True)
        share = [row["accuracy"] for row in mine]
        error = [[s - a for s, a in zip(share, low, strict=True)], [b - s for s, b in zip(share, high, strict=True)]]
        bars = panel.bar(centres, share, width * 0.92, yerr=error, label=policy, capsize=3, error_kw={"lw": 1})
        panel.bar_label(bars, [f"{s:.2f}" for s in share], padding=2, fontsize=8)
    for row in rows:
        if row["budget"] >= row["length"]:
            panel.axhline(row["accuracy"], color="black", ls="--", lw=1, label=row["policy"])
    panel.set_xticks(range(len(budgets)), [f"budget {budget}" for budget in budgets])
    panel.set_ylim(0, 1.12)
    panel.spines[["top", "right"]].set_visible(False)
