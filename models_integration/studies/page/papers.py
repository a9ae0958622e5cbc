"""The papers' own tables, as data beside ours: other models, other lengths, other samples."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from models_integration.studies.estimate import Estimate
from models_integration.studies.page.elements import Html, note, table

__all__ = ["PAPER_TASKS", "Ours", "beside_papers"]

_TABLES = json.loads(Path(__file__).with_name("papers.json").read_text(encoding="utf-8"))
PAPER_TASKS = tuple(dict.fromkeys(task for each in _TABLES for task in each.get("tasks", ())))
"""Our tasks of the same kind as one of theirs."""


class Ours(NamedTuple):
    """Exact match of one of our tasks, by policy and budget."""

    title: str
    task: str
    found: Mapping[tuple[str, str], Estimate]


def beside_papers(ours: Sequence[Ours]) -> Html:
    """Each table of a paper under its source, with our figures of the same policies, budgets and kind of task."""
    made = [note(
        "Not the same model, lengths or samples: a paper's figures beside ours say whether an order repeats, and no"
        " more. The figures are the papers' own.", "warning"
    )]
    for each in _TABLES:
        budgets = dict.fromkeys(budget for _, budget in each["columns"])
        here = [(one, budget) for one in ours if one.task in each.get("tasks", ()) for budget in budgets]
        here = [(one, budget) for one, budget in here if any(at == budget for _, at in one.found)]
        lines = []
        for policy, values in each["rows"].items():
            own = [_own(one, policy, budget) for one, budget in here]
            lines.append([policy, *("" if value is None else f"{value:g}" for value in values), *own])
        headings = [
            "", *(f"{model}, {budget}" for model, budget in each["columns"]),
            *(f"here: {one.title}, {budget}" for one, budget in here),
        ]
        caption = f"{each['source']}, {each['where']}: {each['about']}"
        made.append(table(caption, headings, lines, folded=not here) + note(each.get("note", ""), "small"))
    return Html("\n".join(made))


def _own(one: Ours, policy: str, budget: str) -> str:
    return str(one.found.get((policy, "1.0" if policy == "fullcache" else budget), ""))
