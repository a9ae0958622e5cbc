"""Implementation of `kvspec study`, `compare` and `demo`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from experiments.studies.evidence.audit import audit
from experiments.studies.evidence.kept import CONTROL_BOUNDS, FULL
from experiments.studies.evidence.protocol import check_controls, check_order, registered
from experiments.studies.evidence.rules import ALL, AT_PROMPT, PARTS, Rules, load_rules, rules_of, rules_text
from experiments.studies.evidence.run import (
    Cell,
    Item,
    check_budgets,
    items,
    leases,
    left_of,
    methods,
    rows_of,
    run_items,
)
from experiments.studies.own_texts import question_results, user_question_rows
from experiments.studies.report import (
    control_table,
    failed_controls,
    progress_bar,
    say,
    summary,
    summary_tables,
    table_of,
)
from experiments.studies.results import STUDY, Row, load_rows
from experiments.studies.subject import Loading, Subject
from experiments.studies.workers import Launch, first_failure
from experiments.tasks.needle import CONFIRM
from experiments.tasks.registry import files_of, resolve_task
from kvspec.cli.checks import calibration_of, check_counts, check_folder
from kvspec.cli.options import names_of
from kvspec.cli.study_files import PAGE, check_outputs, write_outputs, write_page
from models_integration.cache.atomic_file import publish_readable
from models_integration.policies.sizes import bytes_per_token, is_size, tokens_of_size
from models_integration.session.method import Method
from models_integration.session.stages import describe_stages
from reference.calibration import Calibration
from spec.errors import SpecError
from spec.files import check_output
from spec.printing import counted
from spec.validate import check_choices

__all__ = [
    "GRIDS", "STOPPED", "Running", "StudyPlan", "Work", "budgets_in_tokens", "finish", "grid_policies", "plan_study",
    "print_audit", "rules_in", "run", "save_rules", "study_of",
]

def _constants(**changed: object) -> str:
    return ", ".join(f'{name}="{one}"' if isinstance(one, str) else f"{name}={one}" for name, one in changed.items())


GRIDS: dict[str, tuple[str, ...]] = {
    name: ("crystalcache", *(f"crystalcache({constants})" for constants in each)) for name, each in {
        # Values that the paper varies, according to Appendix A.
        "appendix-a": (
            *(_constants(T_max=value) for value in (16, 24, 48)), *(_constants(s=value) for value in (2.0, 10.0)),
            *(_constants(alpha=value) for value in (0.25, 0.5, 2.0, 8.0)),
        ),
        "extensions": (
            _constants(parameters="essay"),
            _constants(allocation="tiers"), *(_constants(coverage=value) for value in (0.1, 0.25, 0.5)),
            _constants(merge="median"), _constants(rarity="reciprocal"), _constants(rarity="exponential"),
        ),
    }.items()
}
"""Policies of each grid: CrystalCache with the parameters of the paper, then CrystalCache with changed parameters."""


_EVERY = 10_000
"""Number of questions that no context has, for files and your own tasks, of which no question may be left out."""


def study_of(
    title: str, policies: Sequence[str], budgets: str, tasks: str, lengths: str, samples: int, seeds: str,
    placements: str, models: str, *, controls: bool, bare: bool, calibration: str = "",
) -> dict[str, Any]:
    """Return the entries of the table [study] of a rules file that has the same meaning as the options.

    Raises:
        SpecError: if a list is empty, if there is no sample, or if a seed or length is not a whole number.
    """
    check_counts(samples=samples)
    built_in = all(resolve_task(name).built_in for name in names_of("tasks", tasks))
    checked = tuple(CONTROL_BOUNDS) if controls else ()
    return {
        "title": title, "models": names_of("model", models), "contexts": samples,
        "questions": 1 if built_in else _EVERY, "seeds": _numbers("seed", seeds),
        "lengths": _numbers("length", lengths),
        "placements": names_of("placement", placements), "tasks": names_of("tasks", tasks),
        "policies": [name for name in policies if name != FULL], "budgets": names_of("budgets", budgets),
        "controls": [*((FULL,) if FULL in policies else ()), *checked], "bare": bare,
        **({"calibration": calibration} if calibration else {}),
    }


def budgets_in_tokens(
    study: Mapping[str, Any], loading: Loading, running: "Running", write_rules: Path | None = None,
) -> dict[str, Any]:
    """Return the entries of a study with each memory, such as 64MiB, as the number of tokens of the model.

    Everything that needs no model is checked before the model is loaded.

    Raises:
        SpecError: if a memory is given for several models, or stores no token. Also as in `rules_of` and `run`.
    """
    each = study["budgets"]
    if not any(map(is_size, each)):
        return {**study}
    rules = rules_of(**{**study, "budgets": ["1.0" if is_size(one) else one for one in each]})
    if len(rules.models) > 1:
        reason = "has a memory, whose number of tokens depends on the model: give one model"
        raise SpecError("budgets", ",".join(each), reason)
    if write_rules is None:
        plan_study(rules, running)
    else:
        check_output("write_rules", write_rules, _files_of(rules, None), running.force)
    size = bytes_per_token(replace(loading, model=rules.models[0]).subject().model)
    counts = {one: str(tokens_of_size(one, size)) for one in each if is_size(one)}
    say("; ".join(f"budget {one}: {count} tokens" for one, count in counts.items()))
    return {**study, "budgets": list(dict.fromkeys(counts.get(one, one) for one in each))}


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(one) for one in names_of(option, text)]
    except ValueError as error:
        raise SpecError(option, text, "must be whole numbers, separated by commas, such as 42,43") from error


def save_rules(study: Mapping[str, Any], path: Path, force: bool = False) -> None:
    """Write a study as a rules file, and print the command that runs the rules file.

    Raises:
        SpecError: if `Rules` does not accept an entry, or if the file cannot be written.
    """
    rules = rules_of(**study)
    check_output("write_rules", path, _files_of(rules, None), force)
    try:
        data = rules_text(**study).encode()
    except UnicodeEncodeError as error:
        reason = f"cannot contain the name {error.object[error.start - 9 : error.end]!r}, which is not UTF-8: rename it"
        raise SpecError("write_rules", str(path), reason) from error
    publish_readable(path, data)
    say(f"{path}; run it with: kvspec study --rules {path} --out results --part all")


def grid_policies(grid: str) -> tuple[str, ...]:
    """Return the policies of a grid.

    Raises:
        SpecError: if the grid is unknown.
    """
    check_choices("grid", (grid,), GRIDS)
    return GRIDS[grid]


def rules_in(path: Path, bare: bool) -> Rules:
    """Return the rules in a file. If `bare` is True, no chat template is used.

    Raises:
        SpecError: as in `load_rules`.
    """
    rules = load_rules(path)
    return replace(rules, bare=rules.bare or bare)


STOPPED = 130
"""Exit code of a command that Ctrl-C has stopped."""


@dataclass(frozen=True)
class Running:
    """Settings for a run of a rules file.

    Attributes:
        out: folder for the results and the report.
        part: samples to run: a name in PARTS, or ALL.
        batch_size: number of compacted caches of one sample that share a forward pass.
        again: if True, run failed samples again.
        file: rules file whose claims the report shows. None if the rules come from the options of a command. The path
            of the calibration file is relative to the folder of the rules file.
        table: file for the table of results. If None, no table is written.
        figure: file for the figure. If None, no figure is written.
        force: if True, the written files may replace files that kvspec did not make.
        answers: file for the answers to your own questions. None: no file.
    """

    out: Path
    part: str = ALL
    batch_size: int = 12
    again: bool = False
    file: Path | None = None
    table: Path | None = None
    figure: Path | None = None
    force: bool = False
    answers: Path | None = None

    @property
    def parts(self) -> Sequence[str]:
        """Names of the parts whose samples run."""
        return PARTS if self.part == ALL else (self.part,)


def run(rules: Rules, loading: Loading, running: Running, launch: Launch | None = None) -> None:
    """Measure the samples of each model without a stored result, then print the tables and write the report.

    Raises:
        SpecError: if the rules, an option or a model is invalid. The error is raised before a sample is measured.
        Exit: with exit code 130 if the run is interrupted, or with exit code 1 if a sample or a control failed. Stored
            results are kept.
    """
    with (launch or Launch()).started(running.out, loading.device):
        console, results, plan = Console(), running.out / STUDY, plan_study(rules, running)
        for model in plan.rules.models[1:]:  # the next line checks the first model
            plan.work_on(replace(loading, model=model))
        works = (plan.work_on(replace(loading, model=model)) for model in plan.rules.models)
        rows, failed, stopped = measured(works, console)
        if stopped:
            stored = f"{counted(len(rows), 'sample')} of this run, stored in {results}"
            say(f"stopped after {stored}; run the same command again for the rest")
        if rows:
            failed |= plan.show(rows, console)
        finish(results, failed, stopped)


@dataclass(frozen=True)
class StudyPlan:
    """Run of a rules file that passed every check for which no model is needed.

    Attributes:
        rules: rules of the run, with the commit if the run confirms claims.
        running: settings of the run.
        calibration: calibration for the policies, or None.
    """

    rules: Rules
    running: Running
    calibration: Calibration | None

    def work_on(self, loading: Loading) -> "Work":
        """Load a model, and return the samples to measure on the model.

        Raises:
            SpecError: if the model cannot be loaded, or as in `Work`.
        """
        return Work(self.rules, replace(loading.subject(), calibration=self.calibration), self.running)

    def show(self, rows: Sequence[Row], console: Console) -> bool:
        """Print the tables and write the report, table, figure and answers. Return True if a control fails."""
        running, counted = self.running, summary(rows)
        samples, controls = ([row for row in counted if row["control"] is kind] for kind in (False, True))
        for table in [*summary_tables(samples, console.width), *([control_table(controls)] if controls else [])]:
            console.print(table)
        for result in question_results(user_question_rows(rows)):
            console.print(result, highlight=False, soft_wrap=isinstance(result, str))
        write_page(running.out, [self.rules] if running.file else [])
        write_outputs(rows, running.table, running.figure, running.answers)
        failed = failed_controls(controls)
        if failed:
            say(f"controls FAIL: {', '.join(failed)}. With this model, length and budget, the comparison is not a valid"
                " test of the kept tokens.", console)
        return bool(failed)


def plan_study(rules: Rules, running: Running) -> StudyPlan:
    """Check the rules, the options and the files of a run, before a model is loaded.

    Raises:
        SpecError: if a check fails.
    """
    check_choices("part", (running.part,), (*PARTS, ALL))
    check_counts(batch_size=running.batch_size)
    if not rules.calibration:
        calibration_of((policy.removesuffix(AT_PROMPT) for policy in rules.policies), None)
    calibration = rules.calibrated(running.file.parent if running.file else Path())
    check_folder("out", running.out, STUDY, (PAGE,), running.force)
    check_order(rules, load_rows(running.out / STUDY), running.parts)
    if rules.claims and CONFIRM in running.parts and running.file is not None:
        rules = replace(rules, commit=registered(rules, running.file))
    outputs = {"table": running.table, "figure": running.figure, "answers": running.answers}
    check_outputs(outputs, _files_of(rules, running.file), running.force)
    return StudyPlan(rules, running, calibration)


def measured(works: Iterable["Work"], console: Console) -> tuple[list[Row], bool, bool]:
    """Measure each work until Ctrl-C. Return the rows, whether a sample failed, and whether the run was stopped."""
    rows, failed = list[Row](), False
    for work in works:
        stopped = work.measure(console)
        rows += work.rows()
        failed |= work.failed
        if stopped:
            return rows, failed, True
    return rows, failed, False


def finish(results: Path, failed: bool, stopped: bool) -> None:
    """Print the first failure, if a sample failed. If the run failed or was stopped, exit with code 1 or 130."""
    if failed and (message := first_failure(results)):
        say(message)
    if stopped or failed:
        raise typer.Exit(STOPPED if stopped else 1)


def print_audit(folder: Path) -> bool:
    """Print for each study of a folder whether the git history has the rules before the results, and defects.

    Returns:
        True if a study has a defect that the file of known limits does not list.

    Raises:
        SpecError: as in `audit`.
    """
    result = audit(folder)
    lines = [[one.study, one.rules[:8], one.rows[:8], one.finding] for one in result]
    Console().print(table_of("Rules before rows", ["study", "rules", "rows", "finding"], lines, texts=4))
    for one in result:
        for kind, defects in (("FAILED", one.failures), ("known", one.known)):
            for defect in defects:
                say(f"{kind}: {one.study}: {' '.join(defect.split())}")
    return any(one.failures for one in result)


def _files_of(rules: Rules, file: Path | None) -> list[Path]:
    """Return the paths that a run reads: the rules file, the calibration file and the files of tasks."""
    folder = file.parent if file else Path()
    tasks = [path for task in rules.tasks for path in files_of(task)]
    return [*([file] if file else []), *([folder / rules.calibration] if rules.calibration else []), *tasks]


class Work:
    """Samples of a rules file on one model. The constructor checks the policies, the controls and the samples.

    Raises:
        SpecError: if a policy, a control or a sample cannot be measured.
    """

    def __init__(self, rules: Rules, subject: Subject, running: Running) -> None:
        self.rules, self.subject, self.running = rules, subject, running
        self.policies: dict[str, Method] = methods(rules, self.subject)
        check_controls(rules, {name: method.policy for name, method in self.policies.items()})
        self.items: list[Item] = list(items(rules, self.subject, running.parts))
        lengths = dict.fromkeys(item.context_length for item in self.items)
        self.warnings = list(dict.fromkeys(check_budgets(rules, self.policies, lengths)))
        self.failed = False

    def measure(self, console: Console) -> bool:
        """Measure the samples without a stored result. Return True if Ctrl-C stopped the run."""
        rules, subject, results = self.rules, self.subject, self.running.out / STUDY
        every: dict[str, tuple[Item, tuple[Cell, ...]]] = {
            item.unit(rules, subject): (item, item.cells(rules)) for item in self.items
        }
        for warning in self.warnings:
            say(f"warning: {warning}", console)
        try:
            with leases(results) as held:
                left = left_of(results, rules, subject, self.items)
                held.plan(left.keys() | (every.keys() & held.stored()))
                if self.running.again:
                    held.again(left)
                checks = sum(bool(item.control) for item, _ in every.values())
                samples = counted(len(every), "sample")
                samples += f" ({counted(checks, 'sample')} only for controls)" if checks else ""
                part = "" if self.running.part == ALL else f" {self.running.part} samples,"
                say(
                    f"{rules.title}:{part} model {subject.name}, backend {self.backends}, rules {rules.digest[:8]};"
                    f" {samples}, {len(every) - len(left)} of them stored in {results} by earlier runs", console
                )
                with progress_bar(console, len(left)) as progress:
                    run_items(subject, rules, self.policies, left, held, self.running.batch_size, progress)
                self.failed = bool(held.failed.keys() & left.keys())
        except KeyboardInterrupt:
            return True
        return False

    @property
    def backends(self) -> str:
        """Backends of the stages of all policies, or the name of the option if the policies have different ones."""
        result = {describe_stages(method, on_device=False) for method in self.policies.values()}
        if len(result) > 1:
            return f"{self.subject.backend} (by policy in {PAGE})"
        return next(iter(result), self.subject.backend)

    def rows(self) -> list[Row]:
        """Return the stored rows of the samples."""
        return rows_of(self.running.out / STUDY, self.rules, self.subject, self.items)
