"""`kvspec compare` and `kvspec demo`."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from models_integration.studies.cells import Cell, Plan, cells
from models_integration.studies.compare.compare import Subject, run_cells, verdict
from models_integration.studies.compare.report import comparison_table, control_table, draw
from models_integration.studies.results import Row
from models_integration.studies.subject import load_subject
from reference.calibration import load_calibration

__all__ = ["run"]


def run(plan: Plan, model: str, backend: str, out: Path, calibration: Path | None = None) -> None:
    """Run the plan's cells, then print and draw what they say."""
    console = Console()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # its bar would tear ours
    statistics = None if calibration is None else load_calibration(calibration)
    subject = replace(load_subject(model, backend), calibration=statistics)
    console.print(
        f"model {subject.name}, backend {subject.backend}, {plan.length} tokens, {plan.samples} samples a cell,"
        f" question placed '{plan.placement}'"
    )
    rows = _run_with_progress(console, subject, list(cells(plan)), out / "results.jsonl")
    measured = [row for row in rows if not row["control"]]
    console.print(comparison_table(measured))
    controls = [row for row in rows if row["control"]]
    if controls:
        console.print(control_table(controls, [verdict(row) for row in controls]))
    picture = out / "comparison.png"
    draw(measured, picture, f"{subject.name}, {plan.length} tokens, n = {plan.samples} a bar")
    console.print(f"{out / 'results.jsonl'}  {picture}")


def _run_with_progress(console: Console, subject: Subject, todo: list[Cell], path: Path) -> list[Row]:
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=sum(cell.n for cell in todo))
        return list(
            run_cells(subject, todo, path, lambda what: progress.update(bar, advance=1, description=what))
        )
