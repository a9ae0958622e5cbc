"""Tables of the papers' commands, from the rows of `kvspec paper NAME --model smollm2 --quick`."""

from functools import partial
from itertools import product
from typing import Any

from experiments.studies.evidence.kept import FULL
from experiments.studies.evidence.run import merged
from experiments.studies.papers import COSTS, MEASURES, PAPERS, Paper, Part, Table, load_paper, rules_of_part
from experiments.studies.papers.injection import TEMPLATES
from experiments.studies.papers.injection_tables import CACHEBLEND, LOCOMO, InjectionTable, filled_lines, tables_of
from experiments.studies.papers.tables import Measured, fill, shaped
from lab.measure.evidence_rows import HOME, rows_of

__all__ = ["PAPER_TABLES"]


def paper_table(name: str, paper: Paper, table: Table) -> list[list[str]]:
    """Return a table of a paper from the rows of `kvspec paper NAME --model smollm2 --quick`."""
    parts = [part for part in paper.parts if part.name in table.parts]
    result = fill(table, paper, [_asked(name, paper, part) for part in parts])
    head, lines = shaped(result)
    head[0] += f" (n = {' to '.join(map(str, dict.fromkeys((result.n[0], result.n[-1]))))})"
    return [head, *lines]


def _asked(name: str, paper: Paper, part: Part) -> Measured:
    """Return the rows of a part, with the cells that its rules name."""
    rules = rules_of_part(paper, part, ["smollm2"], (), True)
    assert rules is not None
    rows, cells = rows_of(f"paper-{name}"), {(FULL, "1.0"), *product(rules.policies, rules.budgets)}
    if part.kind == COSTS:
        return Measured(rules, "smollm2", [row for row in rows if row["task"] == COSTS])
    return Measured(rules, "smollm2", [
        {**row, "cells": [cell for cell in row["cells"] if (cell["policy"], cell["budget"]) in cells]}
        for row in merged(row for row in rows if row["task"] in rules.tasks)
        if row["length"] in rules.lengths and row["seed"] in rules.seeds and row["index"] < rules.contexts
    ])


def says_nothing(name: str, paper: Paper, table: Table) -> bool:
    """Return True for a table of right answers, of which the full cache gives none."""
    measured = [_asked(name, paper, part) for part in paper.parts if part.name in table.parts and part.kind != COSTS]
    cells = [cell for one in measured for row in one.rows for cell in row["cells"] if cell["policy"] == FULL]
    return table.measure == MEASURES[0] and bool(cells) and not any(cell["right"] for cell in cells)


def injection_table(table: InjectionTable) -> list[list[str]]:
    """Return a table of the paper on injection, from the rows of `kvspec paper injection --model smollm2 --quick`."""
    result: dict[str, list[Any]] = {}
    for row in rows_of("paper-injection"):
        result.setdefault(row["session"], []).append(row)
    n = len(next(iter(result.values())))
    return [[f"{table.headings[0]} (n = {n})", *table.headings[1:]], *filled_lines(table, result)]


_EVERY = {
    f"{name}-{table.name}": partial(paper_table, name, paper, table) for name in PAPERS
    if (HOME / f"paper-{name}.jsonl.xz").exists() for paper in (load_paper(name),) for table in paper.tables
    if table.parts and not any(part.needs_files for part in paper.parts if part.name in table.parts)
    and not says_nothing(name, paper, table)
} | {f"injection-{table.name}": partial(injection_table, table) for table in tables_of(TEMPLATES["markers"])
       if table.name not in (LOCOMO, CACHEBLEND)}
PAPER_TABLES = {
    name: make for name, make in _EVERY.items() if (HOME / f"paper-{name.partition('-')[0]}.jsonl.xz").exists()
}
