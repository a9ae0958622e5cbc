"""Fixture of the scale lane (`test_scale_*.py`), whose inputs have full size and need compiled kernels."""

import os

import pytest

# These variables turn a compiled backend into an interpreted one, whose tests take hours instead of seconds.
INTERPRETERS = ("TRITON_INTERPRET", "NUMBA_DISABLE_JIT")


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skip the test if kernels are interpreted."""
    for name in INTERPRETERS:
        if os.environ.get(name, "0") not in ("", "0"):
            pytest.skip(f"the scale lane needs compiled code, and {name} = {os.environ[name]}")
