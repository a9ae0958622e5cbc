"""Run `python -m lab.mutants` to try the mutants without a verdict; 1 if a mutant is not killed.

    run        try the mutants: with `--changed` those whose function or item has changed since the last accepted run,
               with `--item ID` or `-k PART` a selection
    list       print the names of the mutants and the error of each
    accept     write the killed mutants to killed.lock, which `--changed` reads

`--folder .mutants` contains the verdicts, and a later run skips mutants with a verdict.
"""

import os
import sys

from conformance.paths import ROOT

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # NumPy reads these when it is first imported

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from lab.mutants import results, written
from lab.mutants.written import MUTANTS, WrittenMutant


def main(arguments: list[str] | None = None) -> int:
    """Run, list or accept mutants."""
    parser = argparse.ArgumentParser(
        prog="lab.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("run", "list", "accept"), nargs="?", default="run")
    parser.add_argument("--changed", action="store_true", help="only mutants changed since the last accepted run")
    parser.add_argument("--again", action="store_true", help="also repeat mutants that have a verdict")
    parser.add_argument("--item", metavar="ID", help="only mutants of one item")
    parser.add_argument("-k", metavar="PART", default="", help="only mutants whose name contains PART")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="folder of the verdicts")
    options = parser.parse_args(arguments)
    chosen = written.changed() if options.changed else list(MUTANTS.values())
    part = options.k.upper().replace("-", "_")
    chosen = [one for one in chosen if part in one.name and options.item in (None, one.item)]
    if not chosen and not options.changed:
        parser.error("no mutant is selected")
    if options.command == "list":
        size = {one.name: f" (right up to {one.beyond})" if one.beyond else "" for one in chosen}
        print("\n".join(f"{one.name:60} {one.why}{size[one.name]}" for one in chosen))
        return 0
    if options.command == "accept":
        trials = written.trials(chosen)
        written.accept(results.read(options.folder, {trial.key: trial.digest for trial in trials}))
        return 0
    return _run(chosen, options.folder, again=options.again)


def _run(chosen: Sequence[WrittenMutant], folder: Path, *, again: bool) -> int:
    trials, start = written.trials(chosen), perf_counter()
    if again:
        results.forget(folder, {trial.key for trial in trials})
    verdicts = results.run(ROOT, trials, written.judging_files(), folder)
    if len(chosen) == len(MUTANTS):
        print(written.page(list(verdicts.values()), perf_counter() - start))
    alive = [written.verdict_line(one) for one in verdicts.values() if not one.killed]
    killed = f"mutants: {len(verdicts) - len(alive)} of {len(chosen)} killed by an assertion of their item"
    print("\n".join([*alive, killed]))
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
