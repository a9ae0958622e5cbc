"""Pictures of a study: policies over their mean cache, and what one constant of a method does."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models_integration.policies.spelled import spelled
from models_integration.studies.evidence.claims import Estimate, Samples
from models_integration.studies.evidence.kept import BLIND, CONTROLS, FULL
from models_integration.studies.evidence.rules import AT_PROMPT
from models_integration.studies.report import new_figure, save, title_of

__all__ = ["Swept", "draw_policies", "draw_swept", "swept"]

_MARKERS = "osv^<>DPX*dph"
_FEWEST = 5
"""Values from which on a constant has a picture of its own."""
_NAMES = {"survival": "evidence kept"}

Swept = Mapping[float, str]
"""Policies by the value of the one constant in which they differ."""


def draw_policies(samples: Samples, title: str, path: Path) -> Path:
    """A panel for each measure and task: a line per policy over its mean cache, with 95 % intervals."""
    figure, panels = _panels(samples, ("accuracy", "recovery", "survival"), title, "mean cache, part of the full one")
    alone = {policy for values in swept(name for name, _ in samples.cells).values() for policy in values.values()}
    limited = [cell for cell in samples.cells if cell[0] not in (FULL, BLIND) and cell[0] not in alone]
    for measure, some, panel in panels:
        for at, policy in enumerate(dict.fromkeys(name for name, _ in limited)):
            cells = [cell for cell in limited if cell[0] == policy]
            _line(
                panel, [some.share(cell) for cell in cells], [getattr(some, measure)(cell) for cell in cells],
                policy, f"C{at % 10}", _MARKERS[at % len(_MARKERS)], "-" if at < 10 else ":",
            )
    return _saved(figure, panels[0][2], path)


def swept(policies: Iterable[str]) -> Mapping[tuple[str, str], Swept]:
    """Policies that differ in one number alone, by name and constant."""
    found: dict[tuple[str, str], dict[float, str]] = {}
    for policy in policies:
        name, constants = (policy, {}) if policy in CONTROLS else spelled(policy.removesuffix(AT_PROMPT))
        if len(constants) == 1 and isinstance(value := next(iter(constants.values())), int | float):
            found.setdefault((name, next(iter(constants))), {})[value] = policy
    return {each: dict(sorted(values.items())) for each, values in found.items() if len(values) >= _FEWEST}


def draw_swept(samples: Samples, name: str, constant: str, values: Swept, title: str, path: Path) -> Path:
    """A panel for each measure and task: a line per budget over the constant; dashed, the policy without it."""
    figure, panels = _panels(samples, ("recovery", "survival"), f"{title}: {name}", constant)
    budgets = dict.fromkeys(budget for policy, budget in samples.cells if policy in values.values())
    for measure, some, panel in panels:
        for at, budget in enumerate(budgets):
            each = [getattr(some, measure)((policy, budget)) for policy in values.values()]
            _line(panel, list(values), each, f"budget {budget}", f"C{at}")
            if (name, budget) in some.cells:
                panel.axhline(getattr(some, measure)((name, budget)).value, color=f"C{at}", ls="--", lw=0.8)
    return _saved(figure, panels[0][2], path)


def _panels(
    samples: Samples, measures: Sequence[str], title: str, below: str,
) -> tuple[Figure, list[tuple[str, Samples, Axes]]]:
    """A figure with a row of panels for each measure and a column for each task; each with its samples."""
    tasks = list(dict.fromkeys(row["task"] for row in samples.rows))
    figure = new_figure(2.2 + 2.4 * len(tasks), 2.5 * len(measures), title)
    grid, found = figure.subplots(len(measures), len(tasks), sharex=True, squeeze=False), []
    for row, measure in zip(grid, measures, strict=True):
        row[0].set_ylabel(_NAMES.get(measure, measure), fontsize=8)
        for panel, task in zip(row, tasks, strict=True):
            panel.tick_params(labelsize=7)
            panel.grid(color="0.9", lw=0.6)
            panel.spines[["top", "right"]].set_visible(False)
            found.append((measure, samples.where(task=(task,)), panel))
    for panel, task in zip(grid[0], tasks, strict=True):
        panel.set_title(title_of(task), fontsize=8)
    for panel in grid[-1]:
        panel.set_xlabel(below, fontsize=8)
    return figure, found


def _line(
    panel: Axes, at: Sequence[float], each: Sequence[Estimate], label: str, color: str, marker: str = "o",
    ls: str = "-",
) -> None:
    ends = [[abs(one.low - one.value) for one in each], [abs(one.high - one.value) for one in each]]
    panel.errorbar(
        at, [one.value for one in each], yerr=ends, label=label, color=color, marker=marker, ls=ls, ms=3, lw=1,
        elinewidth=0.5,
    )


def _saved(figure: Figure, panel: Axes, path: Path) -> Path:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=7)
    return save(figure, path)
