"""`python -m conformance.assurance.proofs.coq`: theorems, what they rest on, vectors, engine; `planted`: errors."""

import argparse
import sys
import time

from conformance.assurance.proofs.coq.assumptions import surprises
from conformance.assurance.proofs.coq.build import (
    BUILD,
    HERE,
    ProofFailure,
    compile_all,
    compile_engine,
    fresh,
    missing,
)
from conformance.assurance.proofs.coq.planted import planted
from conformance.assurance.proofs.coq.theorems import stated
from conformance.assurance.proofs.coq.vectors import check_vectors

__all__ = ["main"]


def check() -> int:
    """Compile everything; 1 where a theorem does not hold, rests on an axiom, or a vector differs."""
    started = time.perf_counter()
    fresh(BUILD)
    try:
        compile_all(BUILD)
        found = surprises(BUILD)
        vectors = check_vectors(BUILD)
    except ProofFailure as failure:
        print(failure)
        return 1
    compile_engine(BUILD)
    print("\n".join(found), end="\n" if found else "")
    number = sum(1 for _ in stated(HERE / "proofs"))
    print(f"coq: {number} theorems, {vectors} vectors in the kernel, {len(found)} surprises,"
          f" {time.perf_counter() - started:.0f} s")
    return int(bool(found))


def main(arguments: list[str] | None = None) -> int:
    """Check, or plant errors; one line, and 0, where Coq is not installed."""
    parser = argparse.ArgumentParser(prog="conformance.assurance.proofs.coq", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("check", "planted"), default="check")
    chosen = parser.parse_args(arguments).what
    if gone := missing():
        print(f"coq: {gone}")
        return 0
    return check() if chosen == "check" else planted()


if __name__ == "__main__":
    sys.exit(main())
