"""Fixtures of the server under test and of the witness. Without --kvspec-server, pytest collects no tests."""

from pathlib import Path
from typing import Any

import pytest

from conformance.cache_suite.conftest import loadable_model
from conformance.plugin import precision_of
from conformance.witness.client import Server
from spec.errors import SpecError

_file = pytest.StashKey[str]()
"""Name of the file whose tests apply to the server. Empty without --kvspec-server."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only the tests that send token ids, or only the tests that send text.

    Without --kvspec-server, collect nothing.
    """
    return True if collection_path.is_file() and collection_path.name != config.stash.get(_file, "") else None


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tests, and check that the weights of --kvspec-model are on this machine.

    Raises:
        pytest.UsageError: if the weights are not on this machine, or if the server completes neither ids nor text.
    """
    config.stash[_file] = ""
    if config.getoption("--kvspec-server") is not None:
        loadable_model(config.getoption("--kvspec-model"))
        try:
            config.stash[_file] = "test_server.py" if _server(config).completes_ids() else "test_text.py"
        except SpecError as error:
            raise pytest.UsageError(str(error)) from error


def _server(config: pytest.Config) -> Server:
    return Server.of(config.getoption("--kvspec-server"), config.getoption("--kvspec-model"))


@pytest.fixture(scope="session")
def at_once() -> dict[str, int]:
    """Return a dictionary for the number of requests that the server runs at once, filled by the measurement."""
    return {}


@pytest.fixture
def answer_tokens() -> dict[str, int]:
    """Return a dictionary for the number of answer tokens that a test decides, filled by the test."""
    return {}


@pytest.fixture(scope="session")
def witness(request: pytest.FixtureRequest) -> Any:
    """Return the witness of --kvspec-server, with the weights of --kvspec-model."""
    import torch
    from transformers import AutoModelForCausalLM

    from conformance.server_suite.judge import Witness
    from models_integration.pocket import model_folder

    option = request.config.getoption
    folder = str(model_folder(option("--kvspec-model")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    seed = int(option("--hypothesis-seed", None) or 0)
    try:
        tokenizer = _tokenizer(request.config)
    except Exception:  # a tokenizer of another library, or none: only policies with constants of a tokenizer need it
        tokenizer = None
    return Witness(model, _server(request.config), precision_of(request.config), seed, tokenizer)


def _tokenizer(config: pytest.Config) -> Any:
    from transformers import AutoTokenizer

    from models_integration.pocket import model_folder

    return AutoTokenizer.from_pretrained(str(model_folder(config.getoption("--kvspec-model"))), local_files_only=True)


@pytest.fixture(scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Return the tokenizer of --kvspec-model."""
    return _tokenizer(request.config)
