"""The one runner of `kvspec study`, `kvspec sweep`, `kvspec compare` and `kvspec demo`: rules, to rows and a page."""

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
    """How rules are run.

    Attributes:
        out: the folder of rows and page.
        part: one of PARTS, or ALL.
        batch_size: cells of one sample that are read side by side.
        again: whether samples that failed are made again.
        file: the rules file, whose claims and stages the page shows; None for options of a command. The calibration is
            beside it.
        table, figure: files to write beside the page.
    """

    out: Path
    part: str = ALL
    batch_size: int = 12
    again: bool = False
    file: Path | None = None
    table: Path | None = None
    figure: Path | None = None


def run(rules: Rules, loading: Loading, running: Running) -> None:
    """Measure the samples that are not stored yet, of each model; then print tables and write the page.

    Raises:
        SpecError: before any sample is measured, for what cannot be.
        Exit: with 130, when it is interrupted; what was measured is stored. With 1, where a sample or control failed.
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

    for model in rules.models[1:]:  # the first is loaded once, and checked then
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
    """Print for each study of a folder what the history says.

    Raises:
        SpecError: as `audit`.
    """
    lines = [[one.study, one.rules[:8], one.rows[:8], one.finding] for one in audit(folder)]
    Console().print(table_of("Rules before rows", ["study", "rules", "rows", "finding"], lines, texts=4))


def _in_order(rules: Rules, running: Running) -> Rules:
    """The rules with their commit, if this run confirms claims."""
    parts = _parts(running)
    check_order(rules, load_rows(running.out / STUDY), parts)
    if not rules.claims or CONFIRM not in parts or running.file is None:
        return rules
    return replace(rules, commit=registered(rules, running.file))


def _parts(running: Running) -> Sequence[str]:
    return PARTS if running.part == ALL else (running.part,)


def _show(rows: Sequence[Row], rules: Rules, console: Console, running: Running) -> bool:
    """Print the tables and write the files; whether a control fails."""
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
    """Rules on one model, once everything that can be wrong has been looked at.

    Raises:
        SpecError: for what cannot be measured.
    """

    def __init__(self, rules: Rules, subject: Subject, running: Running) -> None:
        self.rules, self.subject, self.running = rules, subject, running
        self.policies: dict[str, Method] = methods(rules, self.subject)
        self.warnings = list(check_budgets(rules, self.policies))
        check_controls(rules, {name: method.policy for name, method in self.policies.items()})
        self.items: list[Item] = list(items(rules, self.subject, _parts(running)))
        self.failed = False

    def measure(self, console: Console) -> bool:
        """Measure what is not stored; whether somebody has stopped it."""
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
        """The stored rows of its samples."""
        return rows_of(self.running.out / STUDY, self.rules, self.subject, self.items)


def _calibration(rules: Rules, where: Path) -> Calibration | None:
    """The statistics that the rules name, which some policies need."""
    if not rules.calibration:
        calibration_of((policy.removesuffix(AT_PROMPT) for policy in rules.policies), None)
    return rules.calibrated(where)
