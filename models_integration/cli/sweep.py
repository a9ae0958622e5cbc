"""`kvspec sweep`."""

from pathlib import Path

from rich.console import Console

from models_integration.cli.checks import check_budgets, check_counts, check_folder, check_samples
from models_integration.cli.report import SWEEP, write_page
from models_integration.studies.answers import SAMPLES
from models_integration.studies.report import progress_bar
from models_integration.studies.subject import Loading
from models_integration.studies.sweep.plan import GRIDS, Plan, run_plan
from models_integration.studies.sweep.report import sweep_tables
from models_integration.studies.workers import beside

__all__ = ["run"]


def run(plan: Plan, loading: Loading, out: Path, batch_size: int, workers: int) -> None:
    """Run the plan's variants, then print, draw and write what they say.

    Raises:
        SpecError: before any variant is run, for what cannot be run.
    """
    console = Console()
    check_counts(batch_size=batch_size, workers=workers)
    check_budgets("budget", (plan.budget,), plan.length, "every variant")
    check_folder("out", out, SWEEP, SAMPLES)
    subject = loading.subject()
    check_samples(subject, plan.tasks, plan.length, plan.samples, plan.seed)
    about = f"{subject.name}, {plan.length} tokens, B = {plan.tokens} ({plan.budget}), n = {plan.samples}"
    console.print(f"{plan.grid}: {about}, backend {subject.backend}, question placed 'after'")
    total = len(GRIDS[plan.grid]) * len(plan.tasks) * plan.samples
    with beside(workers, out, console), progress_bar(console, total) as progress:
        rows = list(run_plan(subject, plan, out / SWEEP, progress, batch_size))
    for table in sweep_tables(rows, console.width):
        console.print(table)
    write_page(out, [])
