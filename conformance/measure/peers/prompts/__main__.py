"""`nox -s peers -- prompts`: both halves and their page; each half goes on from what it has written."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conformance.measure.peers.prompts.plan import Plan
from conformance.paths import DOCS

__all__ = ["main"]

STUDY = DOCS / "results" / "smollm2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a half, or write the page of both."""
    parser = argparse.ArgumentParser(prog="conformance.measure.peers.prompts", description=__doc__)
    parser.add_argument("half", choices=("ours", "theirs", "page"))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a context")
    parser.add_argument("--budgets", default="0.5,0.2", help="comma-separated shares that are kept")
    parser.add_argument("--out", type=Path, default=Path("results/peers"), help="folder of both halves' lines")
    parser.add_argument("--page", type=Path, default=Path("results/peers/kvpress.md"), help="where the page is written")
    options = parser.parse_args(arguments)
    plan = Plan(options.prompts, options.length, tuple(options.budgets.split(",")), options.out)
    # Each half's imports are its own environment's.
    if options.half == "ours":
        from conformance.measure.peers.prompts.ours import run_ours
        from models_integration.studies.evidence.rules import load_rules

        run_ours(load_rules(STUDY / "rules.toml"), plan, said)
    elif options.half == "theirs":
        from conformance.measure.peers.prompts.theirs import run_theirs

        run_theirs(plan, said)
    else:
        from conformance.measure.peers.prompts.page import write_page

        write_page(plan, options.page)
    return 0


def said(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
