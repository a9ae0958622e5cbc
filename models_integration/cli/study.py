"""`kvspec study`."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from models_integration.evaluation.results import Row
from models_integration.evaluation.subject import load_subject
from models_integration.study.report import markdown
from models_integration.study.run import StudyPlan, run_study

__all__ = ["run"]


def run(plan: StudyPlan, backend: str, out: Path) -> None:
    """Run the plan's conversations, then print and write the tables."""
    console = Console()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # its bar would tear ours
    subject = load_subject("pocket", backend)
    console.print(f"{subject.name}, {plan.tokens} streamed tokens, n = {plan.samples}, backend {subject.backend}")
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=plan.samples * len(plan.arms))
        rows: list[Row] = list(run_study(
            subject, plan, out / "study.jsonl", lambda what: progress.update(bar, advance=1, description=what)
        ))
    tables = markdown(rows, plan.arms)
    console.print(tables, soft_wrap=True, markup=False)
    (out / "study.md").write_text(tables + "\n", encoding="utf-8")
