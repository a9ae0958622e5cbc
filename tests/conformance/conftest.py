"""Fixtures of the tests of servers. Imports are inside functions: without torch, the other tests still run."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    from conformance.cache_suite.judge import save_tiny

    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def model(tiny_llama: Path) -> "PreTrainedModel":
    """Return the tiny model, which no test changes."""
    from conformance.cache_suite.judge import load_model

    return load_model(str(tiny_llama))
