"""The suite judges the extracted engine as anybody's: the stages that the model has, or all of it."""

import os
import subprocess
import sys
from pathlib import Path

from conformance.paths import ROOT

SUITE = "conformance/suite"
QUICK = tuple(f"{SUITE}/test_{name}.py" for name in (
    "trunks", "dissolution", "score", "diversity", "policy_stages", "vectors",
))
"""The files that reach the model's stages with small inputs and published vectors."""
LISTS_TOO_LONG = (
    f"{SUITE}/test_scale_trunks.py::test_a_sentence_that_float32_does_not_count",
    f"{SUITE}/test_scale_dissolution.py::test_a_budget_beyond_2_to_24",
)
"""Tests of 2^24 tokens, to which the model's lists give no answer within 60 s."""


def judge(program: Path, whole: bool = False, *options: str) -> int:
    """Run the suite, with few examples, on the extracted engine; pytest's exit code."""
    engine = f"{sys.executable} -m conformance.assurance.proofs.coq.engine {program}"
    asked = ["--kvspec-profile", "few", "--kvspec-command", engine, "-q", "-p", "no:cacheprovider"]
    if whole:
        asked += ["--kvspec-timeout", "300", "-n", "2", "--dist", "worksteal", SUITE]
        asked += [f"--deselect={test}" for test in LISTS_TOO_LONG]
    else:
        asked += [*QUICK, "-k", "not attention"]
    command = [sys.executable, "-m", "pytest", *asked, *options]
    return subprocess.call(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
