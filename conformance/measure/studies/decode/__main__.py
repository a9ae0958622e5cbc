"""`python -m conformance.measure.studies.decode`: what decode does to facts that are asked for late.

Breaths on, off, and each of their parts off, on the pocket model, at matched mean caches. About a quarter of an hour of
one CPU core with the defaults. A second run goes on from what is stored.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from conformance.measure.studies.decode.plan import Plan
from conformance.measure.studies.decode.predictions import STEPS, predictions
from conformance.measure.studies.decode.report import markdown
from conformance.measure.studies.decode.rules import ARMS
from conformance.measure.studies.decode.run import run_plan
from models_integration.studies.report import progress_bar
from models_integration.studies.subject import Loading

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the conversations and the predictions on some of them, then print and write what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100, help="conversations; every arm sees the same ones")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens after the prompt of 512, a multiple of 64")
    parser.add_argument("--arms", default="", help="comma-separated: 'full,tight: on,tight: window'; all if empty")
    parser.add_argument("--contexts", type=int, default=10, help="conversations for the three predictions; 0 for none")
    parser.add_argument("--backend", default="auto", help="auto, numpy, numba, or 'module:ATTRIBUTE'")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the rows and tables")
    options = parser.parse_args(arguments)
    arms = tuple(name.strip() for name in options.arms.split(",") if name.strip())
    plan, out, console = Plan(options.samples, options.tokens, arms or tuple(ARMS)), options.out, Console()
    subject = Loading("pocket", options.backend).subject()
    console.print(f"{subject.name}, {plan.tokens} streamed tokens, n = {plan.samples}, backend {subject.backend}")
    with progress_bar(console, plan.samples * len(plan.arms) + options.contexts * STEPS) as progress:
        rows = list(run_plan(subject, plan, out / "study.jsonl", progress))
        measured = predictions(subject, options.contexts, plan.tokens, progress)
    tables = markdown(rows, plan.arms)
    console.print(tables, soft_wrap=True, markup=False)
    (out / "study.md").write_text(tables + "\n", encoding="utf-8")
    (out / "study-predictions.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
