"""`kvspec sweep`."""

from pathlib import Path

import typer
from rich.console import Console

from models_integration.cli.checks import check_budgets, check_counts, check_folder, check_samples
from models_integration.cli.report import write_page
from models_integration.studies.answers import SAMPLES
from models_integration.studies.report import progress_bar
from models_integration.studies.results import SWEEP
from models_integration.studies.status import first_failure
from models_integration.studies.subject import Loading
from models_integration.studies.sweep.plan import GRIDS, Plan, run_plan
from models_integration.studies.sweep.report import sweep_tables
from spec.parameters import PAPER

__all__ = ["run"]


def run(plan: Plan, loading: Loading, out: Path, batch_size: int, again: bool) -> None:
    """Run the plan's variants, then print, draw and write what they say.

    Raises:
        SpecError: before any variant is run, for what cannot be run.
        Exit: with 1, where a sample fails.
    """
    console = Console()
    check_counts(batch_size=batch_size)
    check_budgets("budget", (plan.budget,), plan.length, {"every variant": PAPER.N_sink + PAPER.W_recent})
    check_folder("out", out, SWEEP, SAMPLES)
    subject = loading.subject()
    check_samples(subject, plan.tasks, plan.length, plan.samples, plan.seed)
    about = f"{subject.name}, {plan.length} tokens, B = {plan.tokens} ({plan.budget}), n = {plan.samples}"
    console.print(f"{plan.grid}: {about}, backend {subject.backend}, question placed 'after'")
    total = len(GRIDS[plan.grid]) * len(plan.tasks) * plan.samples
    with progress_bar(console, total) as progress:
        rows = list(run_plan(subject, plan, out / SWEEP, progress, batch_size, again))
    for table in sweep_tables(rows, console.width) if rows else ():
        console.print(table)
    if rows:
        write_page(out, [])
    if len(rows) < len(GRIDS[plan.grid]) * len(plan.tasks):
        console.print(first_failure(out / SAMPLES), highlight=False, soft_wrap=True)
        raise typer.Exit(1)
