"""Tests of the Triton backend beyond the common suite. Tests that cannot run are skipped with the reason."""

import os
from importlib.util import find_spec

import pytest


def require_packages() -> None:
    """Skip the module if torch or triton is not installed."""
    for name in ("torch", "triton"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'kvspec[triton]'", allow_module_level=True)


def require_runtime() -> None:
    """Skip the module if no kernel can run."""
    require_packages()
    import torch

    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1", allow_module_level=True)
