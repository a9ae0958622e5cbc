"""Implementation of `kvspec study`, `kvspec sweep`, `kvspec compare` and `kvspec demo`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console

from models_integration.cli.checks import calibration_of, check_counts, check_folder
from models_integration.cli.report import check_outputs, write_outputs, write_page
from models_integration.session.method import Method
from models_integration.studies.evidence.protocol import audit, check_controls, check_order, registered
from models_integration.studies.evidence.rules import ALL, AT_PROMPT, PARTS, Rules
from models_integration.studies.evidence.run import (
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
from models_integration.studies.evidence.summary import control_table, failed_controls, summary, summary_tables
from models_integration.studies.report import progress_bar, table_of
from models_integration.studies.results import STUDY, Row, load_rows
from models_integration.studies.status import first_failure
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks.samples import CONFIRM
from reference.calibration import Calibration
from spec.validate import check_choices

__all__ = ["STOPPED", "Running", "Work", "print_audit", "run"]

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
        table: file for the table of results. None: no table.
        figure: file for the figure. None: no figure.
    """

    out: Path
    part: str = ALL
    batch_size: int = 12
    again: bool = False
    file: Path | None = None
    table: Path | None = None
    figure: Path | None = None


def run(rules: Rules, loading: Loading, running: Running) -> None:
    """Measure the samples of each model without a stored result, then print the tables and write the report.

    Raises:
        SpecError: if the rules, an option or a model is invalid. The error is raised before a sample is measured.
        Exit: with exit code 130 if the run is interrupted, or with exit code 1 if a sample or a control failed. Stored
            results are kept.
    """
    console, results = Console(), running.out / STUDY
    check_choices("part", (running.part,), (*PARTS, ALL))
    check_counts(batch_size=running.batch_size)
    calibration = _calibration(rules, running.file.parent if running.file else Path())
    check_folder("out", running.out, STUDY)
    rules = _in_order(rules, running)
    check_outputs(running.table, running.figure)
    def work_on(model: str) -> Work:
        return Work(rules, replace(replace(loading, model=model).subject(), calibration=calibration), running)

    for model in rules.models[1:]:  # the loop below checks the first model
        work_on(model)
    rows, failed, stopped = list[Row](), False, False
    for model in rules.models:
        work = work_on(model)
        stopped = work.measure(console)
        rows += work.rows()
        failed |= work.failed
        if stopped:
            console.print(
                f"stopped: {len(rows)} samples of this run are in {results}; run the same command again for the rest",
                highlight=False, soft_wrap=True,
            )
            break
    if rows:
        failed |= _show(rows, rules, console, running)
    if failed and (said := first_failure(results)):
        console.print(said, highlight=False, soft_wrap=True)
    if stopped or failed:
        raise typer.Exit(STOPPED if stopped else 1)


def print_audit(folder: Path) -> None:
    """Print for each study of a folder whether the git history has the rules before the results.

    Raises:
        SpecError: as in `audit`.
    """
    lines = [[one.study, one.rules[:8], one.rows[:8], one.finding] for one in audit(folder)]
    Console().print(table_of("Rules before rows", ["study", "rules", "rows", "finding"], lines, texts=4))


def _in_order(rules: Rules, running: Running) -> Rules:
    """Check the order of the parts. If the run confirms claims, return the rules with the commit of the rules file."""
    parts = _parts(running)
    check_order(rules, load_rows(running.out / STUDY), parts)
    if not rules.claims or CONFIRM not in parts or running.file is None:
        return rules
    return replace(rules, commit=registered(rules, running.file))


def _parts(running: Running) -> Sequence[str]:
    return PARTS if running.part == ALL else (running.part,)


def _show(rows: Sequence[Row], rules: Rules, console: Console, running: Running) -> bool:
    """Print the tables and write the report, table and figure. Return True if a control fails."""
    counted = summary(rows)
    measured, controls = ([row for row in counted if row["control"] is kind] for kind in (False, True))
    for table in [*summary_tables(measured, console.width), *([control_table(controls)] if controls else [])]:
        console.print(table)
    write_page(running.out, [rules] if running.file else [])
    write_outputs(rows, running.table, running.figure)
    failed = failed_controls(controls)
    if failed:
        console.print(f"controls FAIL: {', '.join(failed)}. With this model, length and budget, the comparison is"
                      " not a valid test of the kept tokens.")
    return bool(failed)


class Work:
    """Samples of a rules file on one model. The constructor checks the policies, the controls and the samples.

    Raises:
        SpecError: if a policy, a control or a sample cannot be measured.
    """

    def __init__(self, rules: Rules, subject: Subject, running: Running) -> None:
        self.rules, self.subject, self.running = rules, subject, running
        self.policies: dict[str, Method] = methods(rules, self.subject)
        self.warnings = list(check_budgets(rules, self.policies))
        check_controls(rules, {name: method.policy for name, method in self.policies.items()})
        self.items: list[Item] = list(items(rules, self.subject, _parts(running)))
        self.failed = False

    def measure(self, console: Console) -> bool:
        """Measure the samples without a stored result. Return True if Ctrl-C stopped the run."""
        rules, subject, results = self.rules, self.subject, self.running.out / STUDY
        every: dict[str, tuple[Item, tuple[Cell, ...]]] = {
            item.unit(rules, subject): (item, item.cells(rules)) for item in self.items
        }
        for warning in self.warnings:
            console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
        try:
            with leases(results) as own:
                left = left_of(results, rules, subject, self.items)
                own.plan(left.keys() | (every.keys() & own.stored()))
                if self.running.again:
                    own.again(left)
                checks = sum(bool(item.control) for item, _ in every.values())
                samples = f"{len(every)} samples" + (f" ({checks} samples only for controls)" if checks else "")
                part = "" if self.running.part == ALL else f" {self.running.part} samples,"
                console.print(
                    f"{rules.title}:{part} model {subject.name}, backend {subject.backend}, rules {rules.digest[:8]};"
                    f" {samples}, {len(every) - len(left)} of them stored in {results} by earlier runs",
                    highlight=False, soft_wrap=True,
                )
                with progress_bar(console, len(left)) as progress:
                    run_items(subject, rules, self.policies, left, own, self.running.batch_size, progress)
                self.failed = bool(own.failed.keys() & left.keys())
        except KeyboardInterrupt:
            return True
        return False

    def rows(self) -> list[Row]:
        """Return the stored rows of the samples."""
        return rows_of(self.running.out / STUDY, self.rules, self.subject, self.items)


def _calibration(rules: Rules, where: Path) -> Calibration | None:
    """Return the calibration that the rules name, or None. Raise an error if a policy needs a missing calibration."""
    if not rules.calibration:
        calibration_of((policy.removesuffix(AT_PROMPT) for policy in rules.policies), None)
    return rules.calibrated(where)
