"""`python -m conformance.assurance.proofs.floats`: Gappa's proofs, and the worst that was found of each bound."""

import argparse
import sys

from conformance.assurance.proofs.floats.gappa import PROOFS, README, missing, proved, rewritten, stale
from conformance.assurance.proofs.floats.search import CASES, worst

INPUTS = 1000
"""As many as README.md's figures are of."""


def main(arguments: list[str]) -> int:
    """1 where a bound is not proved, is proved by half, or has a counterexample, or README.md has other figures."""
    parser = argparse.ArgumentParser(prog="floats", description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help=f"inputs of each search. Default: {INPUTS}")
    parser.add_argument("--write", action="store_true", help="write the largest errors into README.md")
    asked, failed = parser.parse_args(arguments), 0
    print(missing() or "Gappa, of each side and half of the bound:")
    for proof in () if missing() else PROOFS:
        whole, half = all(proved(proof)), all(proved(proof, 0.5))
        failed += not whole or half
        print(f"{proof.item:20} {proof.name:10} {'proved' if whole else 'NOT PROVED'}{', by half too' if half else ''}")
    print(f"the largest error over the bound, of {asked.inputs} inputs:")
    largest = {}
    for case in CASES:
        found, inputs = worst(case, asked.inputs)
        largest[case.item, case.bound] = found
        failed += found > 1
        print(f"{case.item:20} {case.bound:24} {found:.3g}{f' on {inputs}' if found > 1 else ''}")
    text = README.read_text(encoding="utf-8")
    if asked.write:
        README.write_text(rewritten(text, largest), encoding="utf-8")
    elif asked.inputs == INPUTS:
        for line in stale(text, largest):
            failed += 1
            print(line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
