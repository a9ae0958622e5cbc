"""`kvspec compare` and `kvspec demo`."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from models_integration.cli.progress import progress_bar
from models_integration.studies.compare.plan import Plan, cells
from models_integration.studies.compare.report import comparison_table, control_table, draw
from models_integration.studies.compare.run import run_plan
from models_integration.studies.subject import load_subject
from reference.calibration import load_calibration

__all__ = ["run"]


def run(plan: Plan, model: str, backend: str, out: Path, calibration: Path | None = None) -> None:
    """Run the plan's cells, then print and draw what they say."""
    console = Console()
    statistics = None if calibration is None else load_calibration(calibration)
    subject = replace(load_subject(model, backend), calibration=statistics)
    console.print(
        f"model {subject.name}, backend {subject.backend}, {plan.length} tokens, {plan.samples} samples a cell,"
        f" question placed '{plan.placement}'"
    )
    with progress_bar(console, sum(cell.n for cell in cells(plan))) as progress:
        rows = list(run_plan(subject, plan, out / "results.jsonl", progress))
    measured = [row for row in rows if not row["control"]]
    console.print(comparison_table(measured))
    controls = [row for row in rows if row["control"]]
    if controls:
        console.print(control_table(controls))
    picture = out / "comparison.png"
    draw(measured, picture, f"{subject.name}, {plan.length} tokens, n = {plan.samples} a bar")
    console.print(f"{out / 'results.jsonl'}  {picture}")
