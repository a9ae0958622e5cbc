"""One fixture for all tests of experiments: the long text is tokenized once in a process."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from experiments.studies.evidence import run
from experiments.tasks.context import Prose, read_prose


@pytest.fixture(scope="session", autouse=True)
def one_reading_of_the_prose() -> Iterator[None]:
    """Reuse the tokens for an equal tokenizer. Each command would tokenize the text for most of a second."""
    known = dict[str, Prose]()

    def once(tokenizer: Any) -> Prose:
        name = tokenizer.backend_tokenizer.to_str()
        if name not in known:
            known[name] = read_prose(tokenizer)
        return known[name]

    with patch.object(run, "read_prose", once):
        yield
