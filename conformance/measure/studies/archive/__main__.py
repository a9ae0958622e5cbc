"""`python -m conformance.measure.studies.archive`: which arm answers from archived chunks of conversations.

Arms are wrappers, baselines, codecs, layers, cuts, fillers and drift, on the pocket model's sibling that has seen
conversations. A second run goes on from what is stored.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from conformance.measure.studies.archive.latency import COUNTS, latencies
from conformance.measure.studies.archive.plan import Plan, talks_and_pins
from conformance.measure.studies.archive.report import markdown
from conformance.measure.studies.archive.rules import ARMS
from conformance.measure.studies.archive.run import run_plan
from models_integration.pocket.training.talk import KINDS
from models_integration.studies.report import progress_bar
from models_integration.studies.subject import Loading
from spec.errors import SpecError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the questions, time the first token, then print and write what they say.

    Raises:
        SpecError: for questions that are not a multiple of a conversation's, or an unknown arm.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=240, help="questions, four to a conversation")
    parser.add_argument("--arms", default="", help="semicolon-separated: 'raw;full;text, full'; all if empty")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the time to the first token; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the rows, tables and pins")
    options = parser.parse_args(arguments)
    arms = tuple(name.strip() for name in options.arms.split(";") if name.strip())
    if options.queries % len(KINDS):
        raise SpecError("queries", options.queries, f"must be a multiple of {len(KINDS)}, a conversation's questions")
    run(Plan(options.queries // len(KINDS), arms or tuple(ARMS)), options.rounds, options.out)


def run(plan: Plan, rounds: int, out: Path) -> None:
    """Run the plan and time the first token in `rounds` rounds."""
    console = Console()
    torch.set_num_threads(1)  # for models this small, more threads wait more than they work
    subject = Loading("chat", "numpy").subject()
    talks, pins = talks_and_pins(subject, plan)
    console.print(f"{subject.name}; pins " + ", ".join(f"{cut} {each.digest[:16]}" for cut, each in pins.items()))
    with progress_bar(console, plan.conversations * len(KINDS) + rounds * len(COUNTS)) as progress:
        tables = markdown(list(run_plan(subject, plan, out / "archive-study.jsonl", progress)))
        if rounds:
            tables += "\n\n" + latencies(subject, talks, rounds, COUNTS, progress)
    console.print(tables, soft_wrap=True, markup=False)
    (out / "archive-study.md").write_text(tables + "\n", encoding="utf-8")
    for cut, each in pins.items():
        each.save(out / f"archive-study-pins-{cut}.json")


if __name__ == "__main__":
    main()
