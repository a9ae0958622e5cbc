"""Check the Coq model: `python -m lab.proofs.coq`.

`check` compiles the theorems, checks assumptions and vectors, and tests the extracted engine. `planted` plants errors
in the model. `judge` runs the whole suite on the engine.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from conformance.paths import ROOT
from lab.proofs.coq.build import (
    BUILD,
    ENGINE,
    HERE,
    MODEL,
    ProofFailure,
    compile_all,
    compile_engine,
    fresh,
    missing,
    stated,
    surprises,
)
from lab.proofs.coq.planted import planted
from lab.proofs.coq.vectors import check_vectors
from spec.errors import SpecError

SUITE = "conformance/suite"
QUICK = tuple(f"{SUITE}/test_{name}.py" for name in (
    "trunks", "dissolution", "score", "diversity", "policy_stages", "vectors",
))
"""Test files that reach the stages of the model with small inputs and published vectors."""
LISTS_TOO_LONG = (
    f"{SUITE}/test_scale_trunks.py::test_a_sentence_that_float32_does_not_count",
    f"{SUITE}/test_scale_dissolution.py::test_a_budget_beyond_2_to_24",
)
"""Tests of 2^24 tokens. The lists of the model are too slow for an answer within 60 s."""


def judge(program: Path, whole: bool = False, *options: str) -> int:
    """Run the suite with few examples on the extracted engine, and return the exit code of pytest."""
    engine = f"{sys.executable} -m lab.proofs.coq.engine {program}"
    asked = ["--kvspec-profile", "few", "--kvspec-command", engine, "-q", "-p", "no:cacheprovider"]
    if whole:
        asked += ["--kvspec-timeout", "300", "-n", "2", "--dist", "worksteal", SUITE]
        asked += [f"--deselect={test}" for test in LISTS_TOO_LONG]
    else:
        asked += [*QUICK, "-k", "not attention"]
    command = [sys.executable, "-m", "pytest", *asked, *options]
    return subprocess.call(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def check() -> int:
    """Compile the model, check the theorems and vectors, and test the engine.

    Return 1 if a theorem does not hold or has a forbidden assumption, if a vector differs, or if the suite fails.
    """
    started = time.perf_counter()
    fresh(BUILD)
    try:
        compile_all(BUILD)
        result = surprises(BUILD)
        vectors = check_vectors(BUILD)
    except ProofFailure as failure:
        print(failure)
        return 1
    compile_engine(BUILD)
    print("\n".join(result), end="\n" if result else "")
    number = sum(1 for _ in stated(HERE / "proofs"))
    print(f"coq: {number} theorems, {vectors} vectors in the kernel, {len(result)} surprises,"
          f" {time.perf_counter() - started:.0f} s", flush=True)
    return int(bool(judge(ENGINE) or result))


def judged() -> int:
    """Compile the engine, run the whole suite on it, and return the exit code of pytest."""
    fresh(BUILD)
    compile_all(BUILD, MODEL)
    return judge(compile_engine(BUILD), whole=True)


def main(arguments: list[str] | None = None) -> int:
    """Check, plant errors, or run the suite. If Coq is not installed, print one line and return 0."""
    parser = argparse.ArgumentParser(prog="lab.proofs.coq", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("check", "planted", "judge"), default="check")
    parser.add_argument("files", nargs="*", type=Path, help="rows of errors for planted, in the form of planted.toml,"
                        " in place of planted.toml and the mutants")
    parser.add_argument("--jobs", type=int, help="errors that are planted at a time. Default: the number of cores")
    chosen = parser.parse_intermixed_args(arguments)
    if gone := missing():
        print(f"coq: {gone}")
        return 0
    try:
        return {"check": check, "judge": judged}.get(chosen.what, lambda: planted(chosen.files, chosen.jobs))()
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
