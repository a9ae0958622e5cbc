"""The tables of a paper, filled from rows: our figures with intervals and differences, the published figures beside."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from models_integration.studies.estimate import RESAMPLES, SEED, Estimate, pairs_of, share_of
from models_integration.studies.evidence.controls import EVERY_CONTROL, FULL
from models_integration.studies.evidence.rules import Rules
from models_integration.studies.papers.protocol import BEST, MEASURES, Paper, Table, decided
from models_integration.studies.results import Row
from models_integration.tasks.metrics import CONTAINS, FIRST_NUMBER, boxed, judge
from reference.statistics import bootstrap, draws

__all__ = ["NOT_RUN", "Filled", "Measured", "fill", "shaped", "write_tables"]

NOT_RUN = "not run"
_PUBLISHED = " (published)"
_MIB = 2**20
_SCORE, _SECONDS, _BYTES, _, _MEMORY = MEASURES
_UNITS = {_SECONDS: 1, _MEMORY: _MIB}
Key = tuple[str, ...]


class Measured(NamedTuple):
    """The rows of a part on one model, and the rules that they were asked for by."""

    rules: Rules
    model: str
    rows: Sequence[Row]


class _Value(NamedTuple):
    """One figure of one sample, at its place in a table."""

    row: Key
    column: Key
    sample: tuple[int, str]
    """Number of the row of results, and budget: what policies are compared on."""
    policy: str
    value: float
    exact: float
    """By the exact metric, where the paper's own admits more."""


@dataclass(frozen=True)
class Figure:
    """A cell of a table.

    Attributes:
        value: with its interval.
        exact: by the exact metric.
        over: for each entry of the table's `versus` what it was compared with and the paired difference, if it was.
    """

    value: Estimate
    exact: float
    over: Mapping[str, tuple[str, Estimate]]

    def text(self, intervals: bool, form: str) -> str:
        """As a page shows it, each number in this format."""
        exact = "" if abs(self.exact - self.value.value) < 1e-9 else f" (exact {self.exact:{form}})"
        return (self.value.text(form) if intervals else f"{self.value.value:{form}}") + exact

    def over_text(self, versus: str, intervals: bool) -> str:
        """A difference as a page shows it."""
        if versus not in self.over:
            return ""
        name, found = self.over[versus]
        interval = f" [{found.low:+.2f}, {found.high:+.2f}]" if intervals and found.low == found.low else ""
        return f"{found.value:+.2f}{interval}" + (f" {name}" if versus == BEST else "")


@dataclass(frozen=True)
class Filled:
    """A table with the figures of a run.

    Attributes:
        rows, columns: keys of the lines and columns, ours first.
        ours, published: figures by row and column.
        note: the table's own, and why something was not run.
    """

    table: Table
    rows: Sequence[Key]
    columns: Sequence[Key]
    ours: Mapping[tuple[Key, Key], Figure]
    published: Mapping[tuple[Key, Key], float]
    note: str = ""
    n: Sequence[int] = field(default=())

    def text(self, row: Key, column: Key, intervals: bool = True) -> str:
        """A cell: ours, the paper's, or that it was not run."""
        if (row, column) in self.ours:
            return self.ours[row, column].text(intervals, ".3g" if self.table.measure == _SECONDS else ".2f")
        if any(name.endswith(_PUBLISHED) for name in (*row, *column)):
            value = self.published.get((row, column), np.nan)
            return "" if np.isnan(value) else f"{value:g}"
        return NOT_RUN


def fill(table: Table, paper: Paper, measured: Sequence[Measured], missing: Sequence[str] = ()) -> Filled:
    """A table of a paper from what was measured.

    Args:
        table: of the paper.
        paper: whose method is compared with baselines.
        measured: the parts of the table, each on each model.
        missing: sentences about what was not run.
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
    """Differences from what the table compares with, by model, budget and policy, for a registered rule."""
    found = dict[tuple[str, str, str], list[float]]()
    for group in groups if table.rule else ():
        first, (other,) = group[0], table.versus
        if first.policy not in (*EVERY_CONTROL, other):
            model, budget = (first.row[list(table.rows).index(axis)] for axis in ("model", "budget"))
            found[model, budget, first.policy] = [one.value - every[other][one.sample] for one in group]
    return found


def _values(table: Table, measured: Measured, part: int) -> Iterator[_Value]:
    budgets = [budget for budget in measured.rules.budgets if not table.budgets or budget in table.budgets]
    for at, row in enumerate(measured.rows):
        about = {
            "model": measured.model, "task": _task(row["task"]), "length": str(row["length"]),
            **{name: str(row["metadata"].get(name, "")) for name in ("depth", "density")},
        }
        for axes, value, exact in _found(table, row, budgets):
            known = {**about, **axes}
            row_key, column = (tuple(known[axis] for axis in own) for own in (table.rows, table.columns))
            sample = part * 10**9 + at, axes.get("budget", "")
            yield _Value(row_key, column, sample, axes["policy"], value, exact)


def _found(table: Table, row: Row, budgets: Sequence[str]) -> Iterator[tuple[dict[str, str], float, float]]:
    """What one row of results says: axes that a cell decides, and a figure by both metrics."""
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
    """A figure by the paper's metric, a substring, and by ours, the first number; otherwise twice the same."""
    if measure != _SCORE:
        figure = cell["mean_bytes"] / _MIB if measure == _BYTES else float(boxed(cell["answer"]) is None)
        return figure, figure
    right, value = float(cell["right"]), row["metadata"].get("value")
    if row["metric"] != FIRST_NUMBER or value is None:
        return right, right
    return judge(CONTAINS, cell["answer"], [str(value)]), right


def _task(task: str) -> str:
    """A task by name; one of a file by the name of that."""
    return Path(task.partition(":")[2]).stem if ":" in task else task


def _figure(
    table: Table, paper: Paper, group: Sequence[_Value], every: Mapping[str, Mapping[tuple[int, str], float]],
) -> Figure:
    values, samples = [one.value for one in group], [one.sample for one in group]
    shares = table.measure not in (*_UNITS, _BYTES) and set(values) <= {0.0, 1.0}
    value = share_of(int(sum(values)), len(values)) if shares else _mean(values)
    over = dict[str, tuple[str, Estimate]]()
    (policy, *more) = dict.fromkeys(one.policy for one in group)
    for versus in table.versus if not more else ():
        other = _best(paper, samples, every) if versus == BEST else versus
        if other and other != policy and not (versus == BEST and _is_baseline(paper, policy)):
            second = [every.get(other, {}).get(sample, np.nan) for sample in samples]
            if not np.isnan(second).any() and policy not in EVERY_CONTROL:
                over[versus] = other, pairs_of(values, second).difference
    return Figure(value, float(np.mean([one.exact for one in group])), over)


def _mean(values: Sequence[float]) -> Estimate:
    n, low, high = len(values), np.nan, np.nan
    if n > 1:
        low, high, _ = bootstrap(np.array(values, dtype=np.float64), draws(n, RESAMPLES, SEED))
    return Estimate(float(np.mean(values)), low, high, n)


def _is_baseline(paper: Paper, policy: str) -> bool:
    """Whether a policy is none of the paper's own forms, and no control."""
    return policy not in EVERY_CONTROL and policy.partition("(")[0].partition("-without")[0] != paper.method


def _best(
    paper: Paper, samples: Sequence[tuple[int, str]], every: Mapping[str, Mapping[tuple[int, str], float]],
) -> str:
    """The baseline with the highest mean on these samples, of those that have all of them; "" for none."""
    means = {
        name: np.mean([own[sample] for sample in samples]) for name, own in every.items()
        if _is_baseline(paper, name) and set(samples) <= own.keys()
    }
    return max(means, key=lambda name: means[name], default="")


def _published(table: Table) -> Iterator[tuple[tuple[Key, Key], float]]:
    """The paper's figures, with its models marked as published."""
    def marked(key: Key, axes: Sequence[str]) -> Key:
        return tuple(name + _PUBLISHED * (axis == "model") for name, axis in zip(key, axes, strict=True))

    for name, figures in table.published.items():
        if name != "columns":
            row = marked(tuple(name.split(", ")) if len(table.rows) > 1 else (name,), table.rows)
            for column, value in zip(table.published["columns"], figures, strict=True):
                yield (row, marked(tuple(column), table.columns)), value


def _expected(axes: Sequence[str], table: Table, measured: Sequence[Measured]) -> Iterator[Key]:
    """The keys that the rules ask for; the samples alone say which depths and densities there are."""
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
    """Headings and lines in the shape of the paper; for narrow places ours alone, without intervals or differences."""
    def shown(key: Key) -> bool:
        return published or not any(name.endswith(_PUBLISHED) for name in key)

    columns = [column for column in filled.columns if shown(column)]
    differ = {
        column: [
            versus for versus in filled.table.versus
            if differences and any(versus in figure.over for (_, own), figure in filled.ours.items() if own == column)
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
    """Names and texts of files: all figures as one CSV, a line each, and every table in its shape as LaTeX."""
    yield "tables.csv", pd.DataFrame([line for one in filled for line in _tidy(one)]).convert_dtypes().to_csv(
        index=False
    )
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
            for versus, (name, found) in figure.over.items():
                line |= {f"over {versus}": found.value, f"{versus} low": found.low, f"{versus} high": found.high}
                line |= {BEST: name} if versus == BEST else {}
            yield line
        elif not np.isnan(paper):
            yield {**about, "published": paper}
        elif filled.text(row, column) == NOT_RUN:
            yield {**about, "n": 0}
