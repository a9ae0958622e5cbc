"""A sweep that several tests run."""

from pathlib import Path

import pytest


@pytest.fixture
def rules(tmp_path: Path, one_thread: None) -> Path:
    """Its file."""
    from conformance.own.models_integration.studies.experiments import RULES

    path = tmp_path / "sweep.toml"
    path.write_text(RULES, encoding="utf-8")
    return path
