"""A sequence lives on from a file: the state machine of the suite, whose states are also saved and loaded."""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from conformance.checks import decode_checks
from conformance.checks.decode_checks import Life
from conformance.strategies.trunks import frozen_state
from models_integration.cache.snapshot import packed, unpacked
from models_integration.cache.tensor_file import read, write
from spec.backend import Backend

pytestmark = pytest.mark.law("saved-is-what-was")


class SavedLife(Life):
    """A life that also goes through files, as a cache's states do."""

    @rule()
    def save_and_load(self) -> None:
        """Written to a file and read again, it is the same state and goes on as such."""
        numbers, arrays = packed(self.state)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            write(path, {"format": "state", "manifest": json.dumps(numbers)}, arrays)
            said, arrays = read(path)
            again = unpacked(json.loads(said["manifest"]), arrays)
        assert decode_checks.same_bits(again, self.state)
        self.state = frozen_state(again)


def test_a_sequence_lives_on_from_files(decoder: Backend) -> None:
    """Any order of prompts, steps, turns, chunks, evictions, copies and files."""
    profile = settings.default or settings()
    lives = settings(profile, max_examples=max(20, profile.max_examples // 3), stateful_step_count=20)
    run_state_machine_as_test(partial(SavedLife, decoder), settings=lives)  # type: ignore[arg-type]
