"""`kvspec sweep`."""

import json
from pathlib import Path

from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.progress import progress_bar
from models_integration.studies.subject import load_subject
from models_integration.studies.sweep.plan import GRIDS, Plan
from models_integration.studies.sweep.report import draw, markdown, sweep_table
from models_integration.studies.sweep.run import run_plan

__all__ = ["run"]


def run(plan: Plan, model: str, backend: str, out: Path) -> None:
    """Run the plan's variants, then print, draw and write what they say."""
    console = Console()
    subject = load_subject(model, backend)
    about = f"{subject.name}, {plan.length} tokens, B = {plan.tokens} ({plan.budget}), n = {plan.samples}"
    console.print(f"{plan.grid}: {about}, backend {subject.backend}, question placed 'after'")
    with progress_bar(console, len(GRIDS[plan.grid]) * len(plan.tasks) * plan.samples) as progress:
        rows = list(run_plan(subject, plan, out / "sweep.jsonl", progress))
    console.print(sweep_table(rows))
    stem = out / f"sweep-{plan.grid}"
    publish_readable(stem.with_suffix(".json"), (json.dumps(rows, indent=1) + "\n").encode())
    publish_readable(stem.with_suffix(".md"), markdown(rows).encode())
    draw(rows, stem.with_suffix(".png"), f"{plan.grid}: {about}")
    console.print("  ".join(str(stem.with_suffix(suffix)) for suffix in (".json", ".md", ".png")))
