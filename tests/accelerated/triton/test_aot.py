"""Tests without a GPU: the kernels compile for three devices, use tensor cores, and do not spill registers."""

# ruff: noqa: E402 - the imports below need what is asked for first

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from conformance.paths import ROOT
from tests.accelerated.triton import require_packages

require_packages()

from accelerated.triton_gpu.launch import SHARED
from tests.accelerated.triton.aot import TARGETS

pytestmark = pytest.mark.judges("triton")

DOT_KERNELS = ("row_softmax", "cross_neighbours", "chunk_attention")
WITH_FUNCTIONS = ("routed",)  # the polynomial of its exponential is fused inside; everything around it is not
SPILLED = 64  # bytes a thread

Row = dict[str, Any]


def in_a_compiling_process(*arguments: str) -> str:
    """Return the standard output of a Python process in which kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    actual = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert actual.returncode == 0, actual.stderr[-3000:]
    return actual.stdout


@pytest.fixture(scope="module")
def compiled() -> list[Row]:
    """Return all compiled kernels. S1 has kernels for four head dimensions in bfloat16 on sm_90, and for one elsewhere.

    `nox -s nightly -- kernels` compiles all kernels for all targets.
    """
    printed = in_a_compiling_process("-m", "tests.accelerated.triton.aot", "--json", "64", "96", "128", "256")
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.spec("CC-COATTENTION")
def test_every_kernel_compiles_and_spills_next_to_nothing(compiled: list[Row]) -> None:
    """Check the fastest tiles of an H100. The number of spilled registers depends on the version of the compiler."""
    measured = [row for row in compiled if row["target"] == "sm_90"]
    assert {row["d"] for row in measured if row["kernel"] == "row_softmax"} == {64, 96, 128, 256}
    for name, target in TARGETS.items():
        rows = [row for row in compiled if row["target"] == name]
        assert {row["kernel"] for row in rows} == {row["kernel"] for row in compiled}
        for row in rows:
            assert row["stack"] <= SPILLED, row
            assert row["local"] == 0, row
            assert row["registers"] * row["warps"] * target.gpu.warp_size <= target.registers, row
            assert row["shared"] <= target.shared, row
    # What a device is asked for before the first launch is what the hungriest kernel takes.
    assert max(row["shared"] for row in measured) == SHARED


@pytest.mark.spec("CC-ATTENTION")
def test_attention_runs_on_tensor_cores(compiled: list[Row]) -> None:
    for row in compiled:
        assert (row["matrix"] > 0) == (row["kernel"] in DOT_KERNELS), row


@pytest.mark.spec("CC-KEY-NORM", "NK-STABLE", "NK-SURPRISE")
def test_kernels_in_float64_have_no_fused_multiply_add(compiled: list[Row]) -> None:
    """Check that each operation is rounded: a fused multiply-add would give a different number."""
    for row in compiled:
        assert row["fused"] == 0 or row["kernel"] in WITH_FUNCTIONS, row


ASK_FOR_IT = """
from spec.backend import resolve
from spec.errors import BackendUnavailable
try:
    resolve("triton")
except BackendUnavailable as error:
    print(error)
"""


@pytest.mark.spec("CC-PREFILL")
def test_a_machine_without_a_device_is_told_what_would_make_it_run() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    printed = in_a_compiling_process("-c", ASK_FOR_IT)
    assert "needs a CUDA device" in printed
    assert "TRITON_INTERPRET=1" in printed
    assert "numba" in printed
