"""A paper's evaluation as a file: its studies, with the keys of a rules file, and the published tables that they fill.

`[study]` has what all parts share, each `[[part]]` has what it changes, and `quick` of a part what a quick run changes.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from models_integration.policies.methods import spelled
from models_integration.studies.estimate import format_p
from models_integration.studies.evidence.rules import Rules, check_fields, rules_of
from reference.confirmation import BONFERRONI, Cell, branch_of, choose_lambda, paired_difference
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "AXES", "BEST", "COSTS", "MEASURES", "PAPERS", "RULES", "Paper", "Part", "Table", "decided", "load_paper",
    "rules_of_part",
]

RULES = ("", "lambda", "branch")
"""What a table may be decided by: nothing, the choice of lambda, or Branches A to C."""


def decided(rule: str, paired: Mapping[tuple[str, str, str], Sequence[float]]) -> str:
    """The sentence of a rule; "" for no rule, and if nothing was measured.

    Args:
        rule: one of RULES.
        paired: differences of right answers with and without the penalty, by model, budget and policy.
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
        by_lambda.setdefault(spelled(policy)[1].get("diversity", 0.5), []).append(cell.difference)
    means = ", ".join(f"{penalty:g}: {fmean(found):+.4f}" for penalty, found in by_lambda.items())
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
AXES = ("model", "policy", "budget", "task", "length", "depth", "density", "time", "memory")
"""What rows and columns of a table may be; `time` is a step of a run, in a table of seconds, `memory` what holds it."""
COSTS = "costs"
"""The kind of a part that measures seconds and bytes of one prompt for each length."""
MEASURES = ("score", "seconds", "MiB", "no box", "memory")
BEST = "best baseline"
"""What a table may compare with, beside the name of a policy."""
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A study of a paper.

    Attributes:
        name: of the part.
        study: what it changes in `[study]`.
        quick: what a quick run changes beside that.
        kind: kind of the benchmark files that it reads; "" for tasks of kvspec, COSTS for seconds and bytes.
        files: names of these files, without folder and ending.
        filed: what a run with these files changes beside the tasks, in a part that has other tasks without them.
    """

    name: str
    study: Mapping[str, Any]
    quick: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    files: Sequence[str] = ()
    filed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_files(self) -> bool:
        """Whether there is nothing to measure without a file."""
        return self.kind not in ("", COSTS) and "tasks" not in self.study


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        name: as `--part` has it.
        title: number and subject.
        parts: whose samples it counts; none if kvspec cannot fill it.
        rows, columns: names of AXES.
        policies, budgets: that it counts; by default all of the parts.
        versus: what each figure is compared with: policies, or BEST.
        measure: one of MEASURES.
        rule: one of RULES, which decides about the differences.
        note: what differs from the paper, or why no part fills it.
        published: the columns of the paper, a list of values for each, and a row of figures for each of its rows.

    Raises:
        SpecError: for an unknown axis, measure, or published figures that are not as many as the columns.
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
        check_choices(f"table {self.name}: axes", (*self.rows, *self.columns), AXES)
        check_choices(f"table {self.name}: measure", (self.measure,), MEASURES)
        check_choices(f"table {self.name}: rule", (self.rule,), RULES)
        for name, figures in self.published.items():
            if name != "columns" and len(figures) != len(self.published["columns"]):
                raise SpecError(f"table {self.name}: {name}", figures, "must have a figure for each published column")


@dataclass(frozen=True)
class Paper:
    """The evaluation of a paper.

    Attributes:
        title: of the paper.
        method: the policy that it proposes.
        study: what all parts share.
    """

    title: str
    method: str
    study: Mapping[str, Any]
    parts: Sequence[Part]
    tables: Sequence[Table]

    def of(self, name: str) -> "Paper":
        """The paper with one of its tables and the parts of that, or the whole for ""."""
        if not name:
            return self
        check_choices("part", (name,), [table.name for table in self.tables])
        tables = [table for table in self.tables if table.name == name]
        return Paper(self.title, self.method, self.study, [
            part for part in self.parts if any(part.name in table.parts for table in tables)
        ], tables)


def load_paper(name: str) -> Paper:
    """The evaluation of a paper of PAPERS, or of your own file.

    Raises:
        SpecError: for an unknown name, and for a file that is not as this module describes it.
    """
    if not name.endswith(".toml"):
        check_choices("NAME", (name,), PAPERS)
    path = Path(name) if name.endswith(".toml") else Path(__file__).with_name(f"{name}.toml")
    try:
        read = tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        raise SpecError("NAME", name, f"must be a TOML file: {error}") from error
    parts = [_made(Part, _part(entry)) for entry in read.pop("part", ())]
    tables = [_made(Table, entry) for entry in read.pop("table", ())]
    for table in tables:
        check_choices(f"table {table.name}: parts", table.parts, [part.name for part in parts])
    return _made(Paper, {**read, "parts": parts, "tables": tables})


def _part(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A part's own keys, and those of its study under `study`."""
    own = {one.name for one in fields(Part)}
    return {
        **{name: value for name, value in entry.items() if name in own},
        "study": {name: value for name, value in entry.items() if name not in own},
    }


def _made(kind: Callable[..., T], entry: Mapping[str, Any]) -> T:
    """A record of this kind, or a SpecError that names what is missing or unknown."""
    check_fields("NAME", kind, entry)
    return kind(**entry)


def rules_of_part(
    paper: Paper, part: Part, models: Sequence[str], files: Sequence[Path], quick: bool,
) -> Rules | None:
    """The rules of a part; None if it needs files and none of them is given.

    Raises:
        SpecError: as `rules_of`.
    """
    given = [f"{part.kind}:{path}" for path in files if path.stem in part.files]
    if part.needs_files and not given:
        return None
    filed = {**part.filed, "tasks": given} if given else {}
    changed = {**part.study, **filed, **(part.quick if quick else {})}
    return rules_of(**{"title": f"{paper.title}: {part.name}", **paper.study, **changed, "models": list(models)})
