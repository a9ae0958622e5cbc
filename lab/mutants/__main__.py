"""Run `python -m lab.mutants` to try the mutants without a verdict; 1 if a mutant is not killed.

    run        try the written mutants: with `--changed` those whose function or item has changed since the last
               accepted run, with `--item ID` or `-k PART` a selection
    list       print the names of the mutants and the error of each
    accept     write the killed mutants to killed.lock, which `--changed` reads

With `--operators`, the commands use mutants that operators make. `run` tries a seeded sample (`--size 400 --seed 1`);
with `--survivors` it repeats those that survived. `list` prints the score as Markdown, and fails on a survivor that
survivors.toml does not explain. `--folder .mutants` contains the verdicts, and a later run skips mutants with a
verdict.
"""

import os
import sys

from conformance.paths import ROOT

# NumPy and Numba read these variables when they are first imported: one thread, and Python instead of compiled code.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
if "--operators" in sys.argv:
    os.environ["NUMBA_DISABLE_JIT"] = "1"  # the suite then skips its tests of large sizes

import argparse
from collections import Counter
from pathlib import Path
from time import perf_counter

from lab.mutants import items, results
from lab.mutants.items import read_code, test_modules
from lab.mutants.results import run
from lab.mutants.sites import mutants_of_tree, sample
from lab.mutants.worker import CHECKED


def main(arguments: list[str] | None = None) -> int:
    """Run, list or accept mutants."""
    parser = argparse.ArgumentParser(
        prog="lab.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("run", "list", "accept"), nargs="?", default="run")
    parser.add_argument("--operators", action="store_true", help="use the mutants that operators make")
    parser.add_argument("--changed", action="store_true", help="only mutants changed since the last accepted run")
    parser.add_argument("--again", action="store_true", help="also repeat mutants that have a verdict")
    parser.add_argument("--item", metavar="ID", help="only mutants of one item")
    parser.add_argument("-k", metavar="PART", default="", help="only mutants whose name or key contains PART")
    parser.add_argument("--size", type=int, default=400, help="operators: minimum size of the sample. Default: 400")
    parser.add_argument("--seed", type=int, default=1, help="operators: seed of the sample. Default: 1")
    parser.add_argument("--survivors", action="store_true", help="operators: repeat only the mutants that survived")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="folder of the verdicts")
    options = parser.parse_args(arguments)
    return _of_operators(options) if options.operators else _of_rows(options, parser)


def _of_rows(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Imported only here: with operators, the reference must be imported after the import hook of jaxtyping.
    from lab.mutants import written
    from lab.mutants.written import MUTANTS

    chosen = written.changed() if options.changed else list(MUTANTS.values())
    part = options.k.upper().replace("-", "_")
    chosen = [one for one in chosen if part in one.name and options.item in (None, one.item)]
    if not chosen and not options.changed:
        parser.error("no mutant is selected")
    if options.command == "list":
        size = {one.name: f" (right up to {one.beyond})" if one.beyond else "" for one in chosen}
        print("\n".join(f"{one.name:60} {one.why}{size[one.name]}" for one in chosen))
        return 0
    trials, start = written.trials(chosen), perf_counter()
    if options.command == "accept":
        written.accept(results.read(options.folder, {trial.key: trial.digest for trial in trials}))
        return 0
    if options.again:
        results.forget(options.folder, {trial.key for trial in trials})
    found = run(ROOT, trials, written.judging_files(), options.folder)
    if len(chosen) == len(MUTANTS):
        print(written.page(list(found.values()), perf_counter() - start))
    alive = [written.verdict_line(one) for one in found.values() if one.outcome != "assertion"]
    killed = f"mutants: {len(found) - len(alive)} of {len(chosen)} killed by an assertion of their item"
    print("\n".join([*alive, killed]))
    return int(bool(alive))


def _of_operators(options: argparse.Namespace) -> int:
    judges, found = read_code(ROOT), mutants_of_tree(ROOT)
    every = [mutant for mutant in found if judges.reach(mutant)]
    for path, count in Counter(mutant.path for mutant in found if not judges.reach(mutant)).items():
        print(f"mutants: {count} of {path} left out: no item of the specification and no test module above them")
    sampled = [mutant for mutant in sample(every, options.size, options.seed) if options.k in mutant.key]
    trials = items.trials(ROOT, sampled, judges)
    verdicts = results.read(options.folder, {trial.key: trial.digest for trial in trials})
    if options.command == "run":
        if options.survivors:
            trials = [one for one in trials if one.key in verdicts and not verdicts[one.key].killed]
            results.forget(options.folder, {one.key for one in trials})
        files = [path.relative_to(ROOT).as_posix() for path in test_modules(ROOT)]
        run(ROOT, trials, files, options.folder, CHECKED)
        return 0
    from lab.mutants.results import LIST, explanations, problems, table

    explained = explanations(LIST.read_text(encoding="utf-8"))
    print(table(sampled, every, verdicts, explained))
    reasons = problems(sampled, every, verdicts, explained)
    print("\n".join(["", *reasons]), file=sys.stderr)
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
