"""A sequence lives: prompts, steps, breaths, turns, chunks, evictions and copies in any order."""

from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.checks.decode_checks import Life
from spec.backend import Backend


@pytest.mark.spec("CC-STEP", "CC-BREATH", "CC-SEGMENT", "CC-REEVICT", "CC-LIVE")
def test_a_sequence_lives(decoder: Backend) -> None:
    """Any order of prompts, steps, turns, chunks, evictions and copies."""
    profile = settings.default or settings()
    lives = settings(profile, max_examples=max(20, profile.max_examples // 3), stateful_step_count=20)
    run_state_machine_as_test(partial(Life, decoder), settings=lives)  # type: ignore[arg-type]
