"""`kvspec compare` and `kvspec demo`."""

from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from models_integration.cli.checks import (
    calibration_of,
    check_budgets,
    check_counts,
    check_folder,
    check_samples,
    floors_of,
)
from models_integration.cli.report import write_page
from models_integration.studies.answers import SAMPLES
from models_integration.studies.compare.plan import FULL, Plan, cells, run_plan, stored_cells
from models_integration.studies.compare.report import comparison_tables, control_table, failed_controls
from models_integration.studies.report import progress_bar
from models_integration.studies.results import COMPARISON
from models_integration.studies.status import first_failure
from models_integration.studies.subject import Loading, Subject

__all__ = ["run"]


def run(
    plan: Plan, loading: Loading, out: Path, batch_size: int, calibration: Path | None = None, again: bool = False,
) -> None:
    """Run the plan's cells, then print, write and draw what they say.

    Raises:
        SpecError: before any cell is run, for what cannot be run.
        Exit: with 1, where a control or a sample fails.
    """
    console, results = Console(), out / COMPARISON
    check_counts(batch_size=batch_size)
    subject = _checked(plan, loading, out, calibration)
    all_cells, stored = list(cells(plan)), stored_cells(subject, plan, results)
    console.print(
        f"model {subject.name}, backend {subject.backend}, {plan.length} tokens, {plan.samples} samples a cell,"
        f" question placed '{plan.placement}'; {len(all_cells)} cells, {stored} of them stored in {results}"
    )
    total = sum(cell.n for cell in all_cells)
    with progress_bar(console, total) as progress:
        rows = list(run_plan(subject, plan, results, progress, batch_size, again))
    measured, controls = ([row for row in rows if row["control"] is kind] for kind in (False, True))
    for table in [*comparison_tables(measured, console.width), *([control_table(controls)] if controls else [])]:
        console.print(table)
    if rows:
        write_page(out, [])
    failed = failed_controls(controls)
    if failed:
        console.print(f"controls FAIL: {', '.join(failed)}. The comparison does not measure retention on this model.")
    if len(rows) < len(all_cells):
        console.print(first_failure(out / SAMPLES), highlight=False, soft_wrap=True)
    if failed or len(rows) < len(all_cells):
        raise typer.Exit(1)


def _checked(plan: Plan, loading: Loading, out: Path, calibration: Path | None) -> Subject:
    """The model, once everything that can be wrong has been looked at: what needs no model first."""
    limited = [policy for policy in plan.policies if policy != FULL]
    if limited or plan.controls:
        check_budgets("budgets", plan.budgets, plan.length, {})
    statistics = calibration_of(plan.policies, calibration)
    check_folder("out", out, COMPARISON, SAMPLES)
    subject = replace(loading.subject(), calibration=statistics)
    check_samples(subject, plan.tasks, plan.length, plan.samples, plan.seed)
    floors = floors_of(subject, plan.policies, map(plan.tokens, plan.budgets))
    if limited:
        check_budgets("budgets", plan.budgets, plan.length, floors)
    return subject
