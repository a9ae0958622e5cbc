"""Run `python -m lab.mutants` to try the mutants of the reference; 1 if a mutant is not killed.

    run        try the mutants: with `--changed` those whose function or item has changed since the last accepted run,
               with `--item ID` or `-k PART` a selection
    accept     run the changed mutants, and write the killed ones to killed.lock
    list       print the names of the mutants, each with its error
"""

import os
import sys

from conformance.paths import ROOT

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # NumPy reads these when it is first imported

import argparse
from time import perf_counter

from lab.mutants import written
from lab.mutants.worker import PROFILES, run
from lab.mutants.written import MUTANTS


def main(arguments: list[str] | None = None) -> int:
    """Run, list or accept mutants."""
    parser = argparse.ArgumentParser(
        prog="lab.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("run", "list", "accept"), nargs="?", default="run")
    parser.add_argument("--changed", action="store_true", help="only mutants changed since the last accepted run")
    parser.add_argument("--item", metavar="ID", help="only mutants of one item")
    parser.add_argument("-k", metavar="PART", default="", help="only mutants whose name contains PART")
    options = parser.parse_args(arguments)
    changed = options.changed or options.command == "accept"
    chosen = written.changed() if changed else list(MUTANTS.values())
    part = options.k.upper().replace("-", "_")
    chosen = [one for one in chosen if part in one.name and options.item in (None, one.item)]
    if not chosen and not changed:
        parser.error("no mutant is selected")
    if options.command == "list":
        size = {one.name: f" (right up to {one.beyond})" if one.beyond else "" for one in chosen}
        print("\n".join(f"{one.name:60} {one.why}{size[one.name]}" for one in chosen))
        return 0
    start = perf_counter()
    verdicts = run(ROOT, written.trials(chosen), written.judging_files())
    if options.command == "accept":
        written.accept(verdicts)
    for name, one in verdicts.items():
        if not one.killed:
            print(f"{name}: {one.outcome} {one.raised}\n    {MUTANTS[name].edit.of}: {MUTANTS[name].why}")
    killed = [one for one in verdicts.values() if one.killed]
    for profile in PROFILES:
        any_backend = [one.any_backend for one in killed if one.profile == profile]
        print(f"profile {profile}: {len(any_backend)} killed, {sum(any_backend)} of them by a test for any backend")
    print(f"mutants: {len(killed)} of {len(chosen)} killed by an assertion of their item")
    print(f"{perf_counter() - start:.0f} s")
    return int(len(killed) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
