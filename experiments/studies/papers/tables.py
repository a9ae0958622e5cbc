"""Tables of a paper, filled from rows: kvspec's numbers with intervals and differences, and published numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.studies.evidence.kept import EVERY_CONTROL, FULL
from experiments.studies.evidence.rules import Rules
from experiments.studies.papers import BEST, MEASURES, Paper, Table, decided
from experiments.studies.report import Estimate, mean_of, pairs_of, share_of
from experiments.studies.results import Row
from experiments.tasks.metrics import CONTAINS, FIRST_NUMBER, boxed, judge
from spec.tables import csv_text

__all__ = ["NOT_RUN", "Filled", "Measured", "fill", "shaped", "write_tables"]

NOT_RUN = "not run"
_PUBLISHED = " (published)"
_MIB = 2**20
_SCORE, _SECONDS, _BYTES, _, _MEMORY = MEASURES
_UNITS = {_SECONDS: 1, _MEMORY: _MIB}
Key = tuple[str, ...]


class Measured(NamedTuple):
    """Rows of a part on one model, and the rules of the part."""

    rules: Rules
    model: str
    rows: Sequence[Row]


class _Value(NamedTuple):
    """Number of one sample, with its place in a table."""

    row: Key
    column: Key
    sample: tuple[int, str]
    """Index of the row of results, and budget. Policies are compared on equal values."""
    policy: str
    value: float
    exact: float
    """Value by the exact metric. The paper's metric can be more tolerant."""


@dataclass(frozen=True)
class Figure:
    """Cell of a table.

    Attributes:
        value: estimate with interval.
        exact: estimate by the exact metric.
        over: for each entry of the table's `versus`, the compared policy and the paired difference, if available.
    """

    value: Estimate
    exact: float
    over: Mapping[str, tuple[str, Estimate]]

    def text(self, intervals: bool, form: str) -> str:
        """Return the text for a page, with numbers in this format."""
        exact = "" if abs(self.exact - self.value.value) < 1e-9 else f" (exact {self.exact:{form}})"
        return self.value.text(form, intervals) + exact

    def over_text(self, versus: str, intervals: bool) -> str:
        """Return the text of a difference for a page."""
        if versus not in self.over:
            return ""
        name, result = self.over[versus]
        return result.text("+.2f", intervals) + (f" {name}" if versus == BEST else "")


@dataclass(frozen=True)
class Filled:
    """Table with the numbers of a run.

    Attributes:
        rows, columns: keys of lines and columns, first kvspec's, then the published ones. ours, published: numbers by
            row and column.
        note: note of the table, and reasons why something was not run.
    """

    table: Table
    rows: Sequence[Key]
    columns: Sequence[Key]
    ours: Mapping[tuple[Key, Key], Figure]
    published: Mapping[tuple[Key, Key], float]
    note: str = ""
    n: Sequence[int] = field(default=())

    def text(self, row: Key, column: Key, intervals: bool = True) -> str:
        """Return the text of a cell: kvspec's number, the published number, or "not run"."""
        if (row, column) in self.ours:
            return self.ours[row, column].text(intervals, ".3g" if self.table.measure == _SECONDS else ".2f")
        if any(name.endswith(_PUBLISHED) for name in (*row, *column)):
            value = self.published.get((row, column), np.nan)
            return "" if np.isnan(value) else f"{value:g}"
        return NOT_RUN


def fill(table: Table, paper: Paper, measured: Sequence[Measured], missing: Sequence[str] = ()) -> Filled:
    """Fill a table of a paper from measurements.

    Args:
        table: table of the paper.
        paper: paper whose method is compared with baselines.
        measured: parts of the table, on each model.
        missing: sentences about parts that were not run.
    """
    values = [one for at, some in enumerate(measured) for one in _values(table, some, at)]
    groups: dict[tuple[Key, Key], list[_Value]] = {}
    for one in values:
        if not table.policies or one.policy in table.policies or table.measure in _UNITS:
            groups.setdefault((one.row, one.column), []).append(one)
    every: dict[str, dict[tuple[int, str], float]] = {}
    for one in values:
        every.setdefault(one.policy, {})[one.sample] = one.value
    ours = {key: _figure(table, paper, group, every) for key, group in groups.items()}
    published = dict(_published(table))
    rows, columns = (
        list(dict.fromkeys([*_expected(axes, table, measured), *(key[at] for key in (*ours, *published))]))
        for at, axes in enumerate((table.rows, table.columns))
    )
    counts = sorted({figure.value.n for figure in ours.values()})
    notes = table.note, decided(table.rule, _paired(table, groups.values(), every)), *missing
    return Filled(table, rows, columns, ours, published, " ".join(filter(None, notes)), counts)


def _paired(
    table: Table, groups: Iterable[Sequence[_Value]], every: Mapping[str, Mapping[tuple[int, str], float]],
) -> dict[tuple[str, str, str], list[float]]:
    """Return the differences for a registered rule, by model, budget and policy."""
    result = dict[tuple[str, str, str], list[float]]()
    for group in groups if table.rule else ():
        first, (other,) = group[0], table.versus
        if first.policy not in (*EVERY_CONTROL, other):
            model, budget = (first.row[list(table.rows).index(axis)] for axis in ("model", "budget"))
            result[model, budget, first.policy] = [one.value - every[other][one.sample] for one in group]
    return result


def _values(table: Table, measured: Measured, part: int) -> Iterator[_Value]:
    budgets = [budget for budget in measured.rules.budgets if not table.budgets or budget in table.budgets]
    for at, row in enumerate(measured.rows):
        about = {
            "model": measured.model, "task": _task(row["task"]), "length": str(row["length"]),
            **{name: str(row["metadata"].get(name, "")) for name in ("depth", "density")},
        }
        for axes, value, exact in _numbers_of(table, row, budgets):
            known = {**about, **axes}
            row_key, column = (tuple(known[axis] for axis in key) for key in (table.rows, table.columns))
            sample = part * 10**9 + at, axes.get("budget", "")
            yield _Value(row_key, column, sample, axes["policy"], value, exact)


def _numbers_of(table: Table, row: Row, budgets: Sequence[str]) -> Iterator[tuple[dict[str, str], float, float]]:
    """Yield the numbers of one row of results, with the axes of each cell, by both metrics."""
    if table.measure in _UNITS:
        for name, figure in row[table.measure].items():
            if name == "prefill" or name in (table.policies or (name,)):
                value = figure / _UNITS[table.measure]
                yield {"time": name, "memory": name, "policy": name}, value, value
        return
    for cell in row["cells"]:
        for budget in budgets if cell["policy"] == FULL else (cell["budget"],):
            if budget not in budgets or cell["right"] is None:
                continue
            yield {"policy": cell["policy"], "budget": budget}, *_measured(table.measure, row, cell)


def _measured(measure: str, row: Row, cell: Mapping[str, Any]) -> tuple[float, float]:
    """Return a number by the paper's metric (substring) and by kvspec's metric (first number), if both exist."""
    if measure != _SCORE:
        figure = cell["mean_bytes"] / _MIB if measure == _BYTES else float(boxed(cell["answer"]) is None)
        return figure, figure
    right, value = float(cell["right"]), row["metadata"].get("value")
    if row["metric"] != FIRST_NUMBER or value is None:
        return right, right
    return judge(CONTAINS, cell["answer"], [str(value)]), right


def _task(task: str) -> str:
    """Return the name of a task, or of its file."""
    return Path(task.partition(":")[2]).stem if ":" in task else task


def _figure(
    table: Table, paper: Paper, group: Sequence[_Value], every: Mapping[str, Mapping[tuple[int, str], float]],
) -> Figure:
    values, samples = [one.value for one in group], [one.sample for one in group]
    shares = table.measure not in (*_UNITS, _BYTES) and set(values) <= {0.0, 1.0}
    value = share_of(int(sum(values)), len(values)) if shares else mean_of(np.array(values, dtype=np.float64))
    over = dict[str, tuple[str, Estimate]]()
    (policy, *more) = dict.fromkeys(one.policy for one in group)
    for versus in table.versus if not more else ():
        other = _best(paper, samples, every) if versus == BEST else versus
        if other and other != policy and not (versus == BEST and _is_baseline(paper, policy)):
            second = [every.get(other, {}).get(sample, np.nan) for sample in samples]
            if not np.isnan(second).any() and policy not in EVERY_CONTROL:
                over[versus] = other, pairs_of(values, second).difference
    return Figure(value, float(np.mean([one.exact for one in group])), over)


def _is_baseline(paper: Paper, policy: str) -> bool:
    """Return True if a policy is neither a form of the paper's method nor a control."""
    return policy not in EVERY_CONTROL and policy.partition("(")[0].partition("-without")[0] != paper.method


def _best(
    paper: Paper, samples: Sequence[tuple[int, str]], every: Mapping[str, Mapping[tuple[int, str], float]],
) -> str:
    """Return the baseline with the highest mean among the baselines with all of these samples, or ""."""
    means = {
        name: np.mean([values[sample] for sample in samples]) for name, values in every.items()
        if _is_baseline(paper, name) and set(samples) <= values.keys()
    }
    return max(means, key=lambda name: means[name], default="")


def _published(table: Table) -> Iterator[tuple[tuple[Key, Key], float]]:
    """Yield the published numbers, with the models marked as published."""
    def marked(key: Key, axes: Sequence[str]) -> Key:
        return tuple(name + _PUBLISHED * (axis == "model") for name, axis in zip(key, axes, strict=True))

    for name, figures in table.published.items():
        if name != "columns":
            row = marked(tuple(name.split(", ")) if len(table.rows) > 1 else (name,), table.rows)
            for column, value in zip(table.published["columns"], figures, strict=True):
                yield (row, marked(tuple(column), table.columns)), value


def _expected(axes: Sequence[str], table: Table, measured: Sequence[Measured]) -> Iterator[Key]:
    """Yield the keys that the rules give. Depths and densities are known only from samples."""
    for rules, model, rows in measured:
        policies = [name for name in (FULL, *rules.policies) if name != FULL or FULL in rules.controls]
        asked: dict[str, Sequence[str]] = {
            "model": [model], "policy": [name for name in policies if name in (table.policies or policies)],
            "budget": [name for name in rules.budgets if name in (table.budgets or rules.budgets)],
            "task": [*map(_task, rules.tasks)], "length": [*map(str, rules.lengths)],
            "time": ["prefill", *table.policies] if table.policies else [], "memory": [],
        }
        for name in ("depth", "density"):
            asked[name] = sorted({str(row["metadata"][name]) for row in rows if name in row["metadata"]})
        yield from product(*(asked[axis] for axis in axes))


def shaped(
    filled: Filled, *, published: bool = True, intervals: bool = True, differences: bool = True,
) -> tuple[list[str], list[list[str]]]:
    """Return headings and lines in the paper's layout. A narrow layout has only kvspec's numbers without intervals."""
    def shown(key: Key) -> bool:
        return published or not any(name.endswith(_PUBLISHED) for name in key)

    columns = [column for column in filled.columns if shown(column)]
    differ = {
        column: [
            versus for versus in filled.table.versus
            if differences and any(versus in one.over for (_, other), one in filled.ours.items() if other == column)
        ] for column in columns
    }
    headings = [", ".join(filled.table.rows)]
    for column in columns:
        headings += [" ".join(column), *(f"{' '.join(column)}, over {versus}" for versus in differ[column])]
    lines = []
    for row in filter(shown, filled.rows):
        line = [", ".join(row)]
        for column in columns:
            line.append(filled.text(row, column, intervals))
            figure = filled.ours.get((row, column))
            line += [figure.over_text(versus, intervals) if figure else "" for versus in differ[column]]
        lines.append(line)
    return headings, lines


def write_tables(filled: Sequence[Filled]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of files: all numbers as one CSV file, and every table in the paper's layout as LaTeX."""
    yield "tables.csv", csv_text(pd.DataFrame([line for one in filled for line in _tidy(one)]).convert_dtypes())
    for one in filled:
        headings, lines = shaped(one)
        yield f"{one.table.name}.tex", pd.DataFrame(lines, columns=headings).to_latex(index=False, escape=True)


def _tidy(filled: Filled) -> Iterator[dict[str, object]]:
    for row, column in product(filled.rows, filled.columns):
        figure, paper = filled.ours.get((row, column)), filled.published.get((row, column), np.nan)
        about = {"table": filled.table.name, "row": ", ".join(row), "column": " ".join(column)}
        if figure is not None:
            value, low, high, n = figure.value
            line: dict[str, object] = {**about, "n": n, "value": value, "low": low, "high": high, "exact": figure.exact}
            for versus, (name, result) in figure.over.items():
                line |= {f"over {versus}": result.value, f"{versus} low": result.low, f"{versus} high": result.high}
                line |= {BEST: name} if versus == BEST else {}
            yield line
        elif not np.isnan(paper):
            yield {**about, "published": paper}
        elif filled.text(row, column) == NOT_RUN:
            yield {**about, "n": 0}
