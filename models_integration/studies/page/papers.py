"""Published tables of the papers, for comparison with kvspec's results. Models, lengths and samples differ."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

from models_integration.studies.estimate import Estimate
from models_integration.studies.page.elements import Html, note, table
from models_integration.studies.papers.protocol import PAPERS, Paper, Table, load_paper
from models_integration.studies.report import title_of

__all__ = ["PAPER_TASKS", "Ours", "beside_papers"]


class _Published(NamedTuple):
    """Published numbers of a paper by policy, with columns by model and budget, and kvspec's tasks of the same kind."""

    caption: str
    note: str
    tasks: Sequence[str]
    columns: Sequence[tuple[str, str]]
    rows: Mapping[str, Sequence[float]]


def _published() -> Iterator[_Published]:
    for paper in map(load_paper, PAPERS):
        for each in paper.tables:
            tasks = _tasks(paper, each)
            if not each.published or list(each.rows) != ["policy"]:
                continue
            by_task = list(each.columns) == ["model", "task"]
            for some in [(task,) for task in tasks] if by_task else [tuple(tasks)]:
                at = [at for at, key in enumerate(each.published["columns"]) if not by_task or key[1] in some]
                columns = [each.published["columns"][one] for one in at]
                yield _Published(
                    f"{paper.title}, {each.title}{f': {title_of(some[0]).lower()}' if by_task else ''}", each.note,
                    [*some, *(f"{task}_in_prose" for task in some if task == "needle")],
                    [(model, each.budgets[0] if by_task else budget) for model, budget in columns],
                    {name: [own[one] for one in at] for name, own in each.published.items() if name != "columns"},
                )


def _tasks(paper: Paper, each: Table) -> list[str]:
    parts = [part for part in paper.parts if part.name in each.parts and not part.kind]
    return list(dict.fromkeys(task for part in parts for task in {**paper.study, **part.study}["tasks"]))


_TABLES = tuple(_published())
PAPER_TASKS = tuple(dict.fromkeys(task for each in _TABLES for task in each.tasks))
"""kvspec's tasks of the same kind as each task of the papers."""


class Ours(NamedTuple):
    """Exact match in one of kvspec's tasks, by policy and budget."""

    title: str
    task: str
    found: Mapping[tuple[str, str], Estimate]


def beside_papers(ours: Sequence[Ours]) -> Html:
    """Return each published table with its source and kvspec's results for the same policies, budgets and tasks."""
    made = [note(
        "Not the same model, lengths or samples: a paper's figures beside ours say whether an order repeats, and no"
        " more. The figures are the papers' own.", "warning"
    )]
    for each in _TABLES:
        budgets = dict.fromkeys(budget for _, budget in each.columns)
        here = [(one, budget) for one in ours if one.task in each.tasks for budget in budgets]
        here = [(one, budget) for one, budget in here if any(at == budget for _, at in one.found)]
        lines = []
        for policy, values in each.rows.items():
            own = [_own(one, policy, budget) for one, budget in here]
            lines.append([policy, *("" if isnan(value) else f"{value:g}" for value in values), *own])
        headings = [
            "", *(f"{model}, {budget}" for model, budget in each.columns),
            *(f"here: {one.title}, {budget}" for one, budget in here),
        ]
        made.append(table(each.caption, headings, lines, folded=not here) + note(each.note, "small"))
    return Html("\n".join(made))


def _own(one: Ours, policy: str, budget: str) -> str:
    return str(one.found.get((policy, "1.0" if policy == "fullcache" else budget), ""))
