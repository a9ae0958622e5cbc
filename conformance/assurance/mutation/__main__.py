"""`python -m conformance.assurance.mutation run`: try the sample, or what is left; `report`: the score and survivors.

`--size 400 --seed 1` choose the sample and `--folder .mutation` has the verdicts. `run --survivors` tries again those
that survived before, and no others; `run -k PART` only mutants whose key holds PART. `report` prints Markdown
for docs/results and exits 1 where mutants are untried, a survivor has no reason in survivors.toml, or a reason has
no survivor.
"""

import os

from conformance.paths import ROOT

# Read when NumPy and Numba are first imported: one thread, and Python in place of compiled code.
os.environ.update(NUMBA_DISABLE_JIT="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import sys
from collections import Counter
from pathlib import Path

from conformance.assurance.mutation import results
from conformance.assurance.mutation.items import read_code
from conformance.assurance.mutation.mutants import Mutant, mutants_of_tree
from conformance.assurance.mutation.run import run
from conformance.assurance.mutation.sample import sample

__all__ = ["main"]



def main(arguments: list[str] | None = None) -> int:
    """Run or report."""
    parser = argparse.ArgumentParser(prog="conformance.assurance.mutation", description=__doc__)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--size", type=int, default=400, help="mutants in the sample, at least")
    parser.add_argument("--seed", type=int, default=1, help="which sample")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutation", help="where the verdicts are")
    parser.add_argument("--survivors", action="store_true", help="run: only those that survived before, again")
    parser.add_argument("-k", metavar="PART", default="", help="run: mutants whose key holds PART")
    options = parser.parse_args(arguments)
    judges, found = read_code(ROOT), mutants_of_tree(ROOT)
    every = [mutant for mutant in found if judges.reach(mutant)]
    for path, count in Counter(mutant.path for mutant in found if not judges.reach(mutant)).items():
        print(f"mutation: {count} of {path} left out: no item of the specification and no test module above them")
    sampled = sample(every, options.size, options.seed)
    if options.command == "report":
        return _report(sampled, every, options.folder)
    run(ROOT, [mutant for mutant in sampled if options.k in mutant.key], options.folder, options.survivors)
    return 0


def _report(sampled: list[Mutant], every: list[Mutant], folder: Path) -> int:
    # Not before a run: the project itself must not be imported in the process that its mutants are forked from.
    from conformance.assurance.mutation.report import LIST, explanations, problems, table

    verdicts = results.read(ROOT, folder)
    explained = explanations(LIST.read_text(encoding="utf-8"))
    print(table(sampled, every, verdicts, explained))
    found = problems(sampled, every, verdicts, explained)
    print("\n".join(["", *found]), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
