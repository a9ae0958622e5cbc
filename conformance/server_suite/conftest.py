"""Fixtures of the server under test and of the witness. Without --kvspec-server, pytest collects no tests."""

from pathlib import Path
from typing import Any

import pytest

from conformance.cache_suite.conftest import loadable_model
from conformance.plugin import precision_of


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing without --kvspec-server."""
    return True if config.getoption("--kvspec-server") is None else None


def pytest_configure(config: pytest.Config) -> None:
    """Check that the weights of --kvspec-model are on this machine before pytest collects tests."""
    if config.getoption("--kvspec-server") is not None:
        loadable_model(config.getoption("--kvspec-model"))


@pytest.fixture(scope="session")
def at_once() -> dict[str, int]:
    """Return a dictionary for the number of requests that the server runs at once, filled by the measurement."""
    return {}


@pytest.fixture(scope="session")
def witness(request: pytest.FixtureRequest) -> Any:
    """Return the witness of --kvspec-server, with the weights of --kvspec-model."""
    import torch
    from transformers import AutoModelForCausalLM

    from conformance.server_suite.judge import Witness
    from conformance.witness.client import Server
    from models_integration.pocket import model_folder

    option = request.config.getoption
    folder = str(model_folder(option("--kvspec-model")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    server = Server.of(option("--kvspec-server"), option("--kvspec-model"))
    return Witness(model, server, precision_of(request.config), int(option("--hypothesis-seed", None) or 0))
