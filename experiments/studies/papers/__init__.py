"""Evaluation of a paper as a file: studies, with the keys of a rules file, and published tables to fill.

`[study]` has the common values of all parts, and each `[[part]]` has the changes of a part. `quick` of a part has the
changes of a quick run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.studies.evidence.rules import Rules, rules_of
from experiments.studies.report import format_p
from experiments.studies.toml_records import record_of, tables_of
from models_integration.policies.methods import parse_policy
from reference.confirmation import BONFERRONI, Cell, branch_of, choose_lambda, paired_difference
from spec.errors import SpecError
from spec.files import decode_text, parse_toml, read_file
from spec.validate import check_choices

__all__ = [
    "AXES", "BEST", "COSTS", "INJECTION", "MEASURES", "PAPERS", "RULES", "Paper", "Part", "Table", "decided",
    "load_paper", "rules_of_part",
]

RULES = ("", "lambda", "branch")
"""Rules for the decision of a table: no rule, the choice of lambda, or Branches A to C."""


def decided(rule: str, paired: Mapping[tuple[str, str, str], Sequence[float]]) -> str:
    """Return the decision of a rule as a sentence, or "" without a rule or without measurements.

    Args:
        rule: name from RULES.
        paired: right answers with the penalty minus without the penalty, by model, budget and policy.
    """
    if not rule or not paired:
        return ""
    cells = {
        key: paired_difference(np.array(each, dtype=np.float64), np.arange(len(each))) for key, each in paired.items()
    }
    return _chosen(cells) if rule == "lambda" else _branch(cells)


def _chosen(cells: Mapping[tuple[str, str, str], Cell]) -> str:
    by_lambda = dict[float, list[float]]()
    for (_, _, policy), cell in cells.items():
        by_lambda.setdefault(parse_policy(policy)[1].get("diversity", 0.5), []).append(cell.difference)
    means = ", ".join(f"{penalty:g}: {fmean(result):+.4f}" for penalty, result in by_lambda.items())
    return f"The registered rule chooses lambda {choose_lambda(by_lambda):g}; mean differences {means}."


def _branch(cells: Mapping[tuple[str, str, str], Cell]) -> str:
    models = list(dict.fromkeys(model for model, _, _ in cells))
    each = ", ".join(
        f"{model} {budget}: p {format_p(cell.p)}{' (passes Bonferroni)' * (cell.p < BONFERRONI)}"
        for (model, budget, _), cell in cells.items()
    )
    if len(models) != 2:
        return f"The registered rule needs two models and has {len(models)}; {each}."
    first, second = ([cell for (name, _, _), cell in cells.items() if name == model] for model in models)
    return f"The registered rule gives Branch {branch_of(first, second)}; {each}."


PAPERS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))
INJECTION = "injection"
"""Name of the paper about archived chunks. The evaluation of this paper compares sessions instead of policies."""
AXES = ("model", "policy", "budget", "task", "length", "depth", "density", "time", "memory")
"""Possible rows and columns of a table. `time` is a step of a run, and `memory` a part of the memory."""
COSTS = "costs"
"""Kind of a part that measures seconds and bytes of one prompt for each length."""
MEASURES = ("score", "seconds", "MiB", "no box", "memory")
BEST = "best baseline"
"""Name for the comparison with the best baseline instead of a named policy."""


@dataclass(frozen=True)
class Part:
    """Study of a paper.

    Attributes:
        name: name of the part.
        study: changes to `[study]`.
        quick: additional changes of a quick run.
        kind: kind of the benchmark files, "" for tasks of kvspec, or COSTS for seconds and bytes.
        files: names of the benchmark files, without folder and ending.
        filed: additional changes if the user gives files, for a part whose tasks also run without files.
    """

    name: str
    study: Mapping[str, Any]
    quick: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    files: Sequence[str] = ()
    filed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_files(self) -> bool:
        """Return True if the part cannot run without a benchmark file."""
        return self.kind not in ("", COSTS) and "tasks" not in self.study


@dataclass(frozen=True)
class Table:
    """Published table.

    Attributes:
        name: name for the option `--part` and of the LaTeX file.
        title: number and subject of the table.
        parts: parts whose samples are used. Empty if kvspec cannot fill the table.
        rows, columns: names from AXES.
        policies, budgets: policies and budgets of the table. Default: all of the parts.
        versus: policies with which each number is compared, or BEST.
        measure: name from MEASURES.
        rule: name from RULES, for the decision about the differences.
        note: differences from the paper, or the reason why no part fills the table.
        published: columns of the paper, with a list of values each, and the published numbers of each row.

    Raises:
        SpecError: if the name is not allowed in a file name, or if an axis or measure is unknown. Also if a row of
            published numbers does not match the columns.
    """

    name: str
    title: str
    parts: Sequence[str] = ()
    rows: Sequence[str] = ("policy",)
    columns: Sequence[str] = ("model", "budget")
    policies: Sequence[str] = ()
    budgets: Sequence[str] = ()
    versus: Sequence[str] = ()
    measure: str = MEASURES[0]
    rule: str = RULES[0]
    note: str = ""
    published: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w-]+", self.name):
            raise SpecError("table: name", self.name, "must have only letters, digits, '-' and '_', such as 'table-1'")
        check_choices(f"table {self.name}: axes", (*self.rows, *self.columns), AXES)
        check_choices(f"table {self.name}: measure", (self.measure,), MEASURES)
        check_choices(f"table {self.name}: rule", (self.rule,), RULES)
        columns = self.published.get("columns")
        for name, figures in self.published.items():
            if not (isinstance(figures, list) and isinstance(columns, list)):
                reason = "must be a list, as columns must be: type columns = [...] and a list for each row"
                raise SpecError(f"table {self.name}: {name}", figures, reason)
            if name != "columns" and len(figures) != len(columns):
                raise SpecError(f"table {self.name}: {name}", figures, "must have a figure for each published column")


@dataclass(frozen=True)
class Paper:
    """Evaluation of a paper.

    Attributes:
        title: title of the paper.
        method: policy that the paper proposes.
        study: common values of all parts.
    """

    title: str
    method: str
    study: Mapping[str, Any]
    parts: Sequence[Part]
    tables: Sequence[Table]

    def of(self, name: str) -> "Paper":
        """Return the paper with only one table and its parts, or the complete paper for ""."""
        if not name:
            return self
        check_choices("part", (name,), [table.name for table in self.tables])
        tables = [table for table in self.tables if table.name == name]
        return Paper(self.title, self.method, self.study, [
            part for part in self.parts if any(part.name in table.parts for table in tables)
        ], tables)


def load_paper(name: str) -> Paper:
    """Return the evaluation of a paper in PAPERS, or of your own file.

    Raises:
        SpecError: if the name is unknown, or if the file does not have the format in this module's docstring.
    """
    if not name.endswith(".toml"):
        check_choices("NAME", (name,), (*PAPERS, INJECTION))
    path = Path(name) if name.endswith(".toml") else Path(__file__).with_name(f"{name}.toml")
    text = decode_text("NAME", path, read_file("NAME", path))
    try:
        read = parse_toml(text)
    except ValueError as error:
        raise SpecError("NAME", name, f"must be a TOML file: {error}") from error
    try:
        return _paper(read)
    except SpecError as error:
        raise SpecError(error.argument, error.value, f"{error.bound} (in {path.name})") from error


def _paper(read: Mapping[str, Any]) -> Paper:
    parts = [record_of("NAME", Part, _part(entry)) for entry in tables_of(read, "part")]
    tables = [record_of("NAME", Table, entry) for entry in tables_of(read, "table")]
    for table in tables:
        check_choices(f"table {table.name}: parts", table.parts, [part.name for part in parts])
    rest = {name: value for name, value in read.items() if name not in ("part", "table")}
    return record_of("NAME", Paper, rest, {"parts": parts, "tables": tables}, ("parts", "tables"))


def _part(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part's own keys, and the keys of its study under `study`."""
    names = {one.name for one in fields(Part)}
    return {
        **{name: value for name, value in entry.items() if name in names},
        "study": {name: value for name, value in entry.items() if name not in names},
    }


def rules_of_part(
    paper: Paper, part: Part, models: Sequence[str], files: Sequence[Path], quick: bool,
) -> Rules | None:
    """Return the rules of a part, or None if the part needs files and no file is given.

    Raises:
        SpecError: as in `rules_of`.
    """
    given = [f"{part.kind}:{path}" for path in files if path.stem in part.files]
    if part.needs_files and not given:
        return None
    filed = {**part.filed, "tasks": given} if given else {}
    changed = {**part.study, **filed, **(part.quick if quick else {})}
    return rules_of(**{"title": f"{paper.title}: {part.name}", **paper.study, **changed, "models": list(models)})
