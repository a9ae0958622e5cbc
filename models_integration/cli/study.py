"""`kvspec study`."""

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from models_integration.studies.decode.predictions import STEPS, predictions
from models_integration.studies.decode.report import markdown
from models_integration.studies.decode.run import StudyPlan, run_study
from models_integration.studies.results import Row
from models_integration.studies.subject import load_subject

__all__ = ["run"]


def run(plan: StudyPlan, contexts: int, backend: str, out: Path) -> None:
    """Run the plan's conversations and the predictions on `contexts` of them, then print and write what they say."""
    console = Console()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # its bar would tear ours
    subject = load_subject("pocket", backend)
    console.print(f"{subject.name}, {plan.tokens} streamed tokens, n = {plan.samples}, backend {subject.backend}")
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=plan.samples * len(plan.arms) + contexts * STEPS)

        def told(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        rows: list[Row] = list(run_study(subject, plan, out / "study.jsonl", told))
        found = predictions(subject, contexts, plan.tokens, told)
    tables = markdown(rows, plan.arms)
    console.print(tables, soft_wrap=True, markup=False)
    (out / "study.md").write_text(tables + "\n", encoding="utf-8")
    (out / "study-predictions.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
