"""`python -m conformance.measure.families`: each family holds or is refused by name, or the command exits with 1."""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from transformers import logging

from conformance.measure.families.models import Family, families
from conformance.measure.families.run import Outcome, cells, counts, outcomes, page
from conformance.paths import DOCS
from models_integration.studies.report import progress_bar

PAGE = DOCS / "results" / "families.md"


def main(arguments: list[str] | None = None) -> int:
    """Try all families, or those that are named; some minutes."""
    known = {family.name: family for family in families()}
    parser = argparse.ArgumentParser(prog="python -m conformance.measure.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="names of AutoModelForCausalLM; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the table of all cells")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} of docs/results too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.families) - set(known)):
        parser.error(f"no causal family of this transformers: {', '.join(unknown)}")
    if options.write and options.families:
        parser.error("--write is about all families")
    found = tried([known[name] for name in options.families or known])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "families.md").write_text(cells(found), encoding="utf-8")
    if options.write:
        PAGE.write_text(page(found), encoding="utf-8")
    print("\n".join(counts(found)))
    third = [one for one in found if one.verdict == "fails"]
    for one in third:
        print(f"{one.family}, {one.policy}: {one.detail}", file=sys.stderr)
    return int(bool(third))


def tried(chosen: list[Family]) -> list[Outcome]:
    """All outcomes, with the progress on standard error."""
    found: list[Outcome] = []
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # tiny tensors
    with progress_bar(Console(stderr=True), len(chosen)) as done, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in chosen:
            found += outcomes(family)
            done(family.name)
    return found


if __name__ == "__main__":
    sys.exit(main())
