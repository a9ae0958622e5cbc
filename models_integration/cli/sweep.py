"""`kvspec sweep`."""

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from models_integration.cache.atomic_file import publish_readable
from models_integration.studies.results import Row
from models_integration.studies.subject import load_subject
from models_integration.studies.sweep.report import draw_sweep, markdown, sweep_table
from models_integration.studies.sweep.sweep import GRIDS, SweepPlan, run_sweep

__all__ = ["run"]


def run(plan: SweepPlan, model: str, backend: str, out: Path) -> None:
    """Run the plan's variants, then print, draw and write what they say."""
    console = Console()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # its bar would tear ours
    subject = load_subject(model, backend)
    about = f"{subject.name}, {plan.length} tokens, B = {plan.tokens} ({plan.budget}), n = {plan.samples}"
    console.print(f"{plan.grid}: {about}, backend {subject.backend}, question placed 'after'")
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(GRIDS[plan.grid]) * len(plan.tasks) * plan.samples)
        rows: list[Row] = list(run_sweep(
            subject, plan, out / "sweep.jsonl", lambda what: progress.update(bar, advance=1, description=what)
        ))
    console.print(sweep_table(rows))
    stem = out / f"sweep-{plan.grid}"
    publish_readable(stem.with_suffix(".json"), (json.dumps(rows, indent=1) + "\n").encode())
    publish_readable(stem.with_suffix(".md"), markdown(rows).encode())
    draw_sweep(rows, stem.with_suffix(".png"), f"{plan.grid}: {about}")
    console.print("  ".join(str(stem.with_suffix(suffix)) for suffix in (".json", ".md", ".png")))
