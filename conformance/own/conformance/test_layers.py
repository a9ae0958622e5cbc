"""The layer lint sees what it forbids, and the checkout is clean."""

from pathlib import Path

import pytest

from conformance.assurance.layers import forbidden_imports
from conformance.paths import ROOT


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("spec/a.py", "import reference", "spec must not import reference"),
        ("reference/a.py", "from accelerated.numba_cpu import x", "reference must not import accelerated"),
        ("accelerated/numba_cpu/a.py", "def f():\n    import reference", "accelerated must not import reference"),
        ("accelerated/numba_cpu/a.py", "import accelerated.triton_gpu", "numba_cpu must not import triton_gpu"),
        ("models_integration/a.py", "import conformance", "models_integration must not import conformance"),
        ("reference/a.py", "import torch", "reference needs NumPy and jaxtyping alone, not torch"),
    ],
)
def test_a_forbidden_import_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    write(tmp_path, name, text)
    (problem,) = forbidden_imports(tmp_path)
    assert problem.startswith(f"{name}:")
    assert problem.endswith(reason)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reference/a.py", "import numpy\nfrom spec.budget import Budget\nimport math"),
        ("accelerated/triton_gpu/a.py", "import accelerated.numba_cpu, torch"),
        ("spec/tables.py", "import pandera"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert forbidden_imports(tmp_path) == []


def test_this_checkout_is_clean() -> None:
    assert forbidden_imports(ROOT) == []
