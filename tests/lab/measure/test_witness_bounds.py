"""The measurement of the witness's bounds, on a tiny model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.cache_suite.judge import save_tiny
from conformance.server_suite.judge import RULES, Witness
from conformance.server_suite.reading import BOUNDS, Reader, with_noise
from conformance.witness.client import Server
from lab.measure.witness_bounds import (
    FAULTS,
    RIGHT,
    VERDICTS,
    Measured,
    masking_verdict,
    measure,
    right_answers,
    right_row,
    table,
    verdict_table,
)
from tests.conformance.server_verdicts import verdict
from tests.conformance.test_server_suite import Evicting, serving
from tests.models_integration.session.sessions import skip_without_attention


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 1e-4), ("bfloat16", 1e-4, 0.3)])
def test_rounding_of_a_session_is_inside_the_bound(dtype: str, least: float, most: float, folder: Path) -> None:
    """Accept undecided verdicts in bfloat16, because rounding depends on the processor."""
    skip_without_attention(getattr(torch, dtype))
    rounded = ["undecided"] if dtype == "bfloat16" else []
    actual = measure(str(folder), dtype, ["shared prefixes"])
    assert len(actual) == 4
    assert all(least < one.mean < most for one in actual)
    decided = [one for one in actual if one.decided]
    assert decided
    for one in decided:
        assert {"full cache", *(FAULTS if dtype == "float32" else ())} <= {*one.noticed}
        assert one.verdicts[RIGHT] in {"passed", *rounded}
        assert one.verdicts["full cache"] in {"failed", *rounded}


@pytest.mark.law("figures-are-counted-right")
def test_right_answers_have_the_rounding_of_their_dtype(folder: Path) -> None:
    skip_without_attention(torch.bfloat16)
    exact, rounded = (right_answers(str(folder), dtype, ["shared prefixes"], 0) for dtype in ("float32", "bfloat16"))
    assert max(difference for difference, _ in exact) < 1e-4 < min(difference for difference, _ in rounded)
    assert not any(failed for _, failed in exact + rounded)
    row = right_row("bfloat16", [(0.1, False), (0.5, True), (0.4, False)])
    assert row.endswith("3 right answers, largest difference 0.5, 2 above the tolerance of 0.3, 1 false alarms")


@pytest.mark.parametrize(("difference", "noise", "expected"), [
    (0.0, 2.0**-8, "passed"), (1.0, 2.0**-8, "failed"), (1.0, 0.5, "undecided"), (0.0, None, "undecided"),
])
def test_the_measured_verdict_is_that_of_the_rule(
    difference: float, noise: float | None, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare with `check_masking`. If `noise` is None, masking changes nothing, which decides nothing."""
    skip_without_attention(torch.bfloat16)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with serving(Evicting(model)) as url:
        witness = Witness(model, Server.of(url, "tiny"), "bfloat16")
        (reading, *_) = witness.readings("shared prefixes")
    reading.__dict__["stated_logprobs"] = reading.masked + difference
    if noise is None:
        reading.__dict__["full"] = reading.masked
    monkeypatch.setattr(witness, "noisy", lambda: (with_noise(model, noise or 0.0, seed) for seed in range(3)))
    one, n = reading.statement, len(reading.statement.prompt_ids)
    moved = max(
        witness.bound.apart(Reader(copy).logprobs(one.ids, n, reading.events, one.positions), reading.masked)
        for copy in witness.noisy()
    )
    assert masking_verdict(BOUNDS["bfloat16"], difference, reading.has_power, moved) == expected
    by_rule = verdict(RULES["masking"], reading)
    assert (by_rule if by_rule in VERDICTS else "failed") == expected


def measured(mean: float, largest: float, decided: bool, noticed: tuple[str, ...], *verdicts: str) -> Measured:
    return Measured(mean, largest, decided, noticed, dict(zip((RIGHT, *FAULTS), verdicts, strict=True)))


@pytest.mark.law("figures-are-counted-right")
def test_the_tables_count_answers() -> None:
    passed, undecided, failed = VERDICTS
    answers = {"bfloat16": [
        measured(0.03, 1.0, True, ("full cache",), passed, failed, passed, passed, passed),
        measured(0.21, 0.5, True, ("full cache", "renumbered"), failed, failed, passed, undecided, failed),
        measured(0.1, 0.1, False, FAULTS, passed, undecided, failed, failed, failed),
    ]}
    assert table(answers).splitlines()[2] == "| bfloat16 | 3 | 0.03 to 0.21 | 1 | 2 | 2 | 0 | 0 | 1 |"
    assert verdict_table(answers).splitlines()[2:] == [
        "| bfloat16 | right answer | 2 | 0 | 1 |", "| bfloat16 | full cache | 0 | 1 | 2 |",
        "| bfloat16 | slot numbers | 2 | 0 | 1 |", "| bfloat16 | one exchanged token | 1 | 1 | 1 |",
        "| bfloat16 | renumbered | 1 | 0 | 2 |",
    ]
