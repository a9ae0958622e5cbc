"""`kvspec archive study`."""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from models_integration.pocket.talk import KINDS
from models_integration.studies.archive.arms import ARMS
from models_integration.studies.archive.latency import COUNTS, latencies
from models_integration.studies.archive.report import markdown
from models_integration.studies.archive.run import StudyPlan, run_study, talks_and_pins
from models_integration.studies.subject import load_subject
from spec.errors import SpecError

__all__ = ["run"]


def run(queries: int, arms: tuple[str, ...], rounds: int, out: Path) -> None:
    """Ask the questions, time the first token, then print and write what they say."""
    if queries % len(KINDS):
        raise SpecError("queries", queries, f"must be a multiple of {len(KINDS)}, the questions of a conversation")
    plan, console = StudyPlan(queries // len(KINDS), arms or tuple(ARMS)), Console()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # its bar would tear ours
    torch.set_num_threads(1)  # for models this small, more threads wait more than they work
    subject = load_subject("chat", "numpy")
    talks, pins = talks_and_pins(subject, plan)
    console.print(f"{subject.name}; pins " + ", ".join(f"{cut} {each.digest[:16]}" for cut, each in pins.items()))
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=plan.conversations * len(KINDS) + rounds * len(COUNTS))

        def told(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        rows = list(run_study(subject, plan, out / "archive-study.jsonl", told))
        tables = markdown(rows)
        if rounds:
            tables += "\n\n" + latencies(subject, talks, rounds, COUNTS, told)
    console.print(tables, soft_wrap=True, markup=False)
    (out / "archive-study.md").write_text(tables + "\n", encoding="utf-8")
    for cut, each in pins.items():
        each.save(out / f"archive-study-pins-{cut}.json")
