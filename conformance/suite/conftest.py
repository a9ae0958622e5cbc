"""The scale lane (`test_scale_*.py`): full sizes, for code that runs as it is used, never for an interpreter."""

import os

import pytest

# Variables that turn a compiled backend into an interpreted one, which takes hours for what takes seconds.
INTERPRETERS = ("TRITON_INTERPRET", "NUMBA_DISABLE_JIT")


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skips where kernels are interpreted."""
    for name in INTERPRETERS:
        if os.environ.get(name, "0") not in ("", "0"):
            pytest.skip(f"the scale lane needs compiled code, and {name} = {os.environ[name]}")
