"""Faults that the witness finds in bfloat16, by the likelihood of the answers of a group."""

import pytest
import torch
from transformers import PreTrainedModel

from conformance.server_suite.faults import hypotheses
from conformance.server_suite.judge import RULES, Reading, Witness
from conformance.server_suite.likelihood import likelier_fault
from conformance.server_suite.reading import Reader, computing_in
from conformance.witness.client import Server
from tests.conformance.server_verdicts import verdict
from tests.conformance.test_server_suite import SHARED, Evicting, serving
from tests.models_integration.session.sessions import skip_without_attention

pytestmark = pytest.mark.law("the-proof-has-teeth")

NAMES = (
    "the log-probabilities are those of the full cache: nothing was evicted",
    "kept tokens and the answer have positions of the rule 'slots', not 'kept'",
    "full-attention layer 1 evicted nothing", "KV heads 0 and 1 of full-attention layer 1 are exchanged",
    "only in full-attention layer 2, positions are not those of the rule 'kept'",
)


@pytest.fixture(scope="module")
def readings(model: PreTrainedModel) -> list[Reading]:
    """Return the readings of a right server in float32, by a witness of a server in bfloat16."""
    skip_without_attention(torch.bfloat16)
    with serving(Evicting(model)) as url:
        return Witness(model, Server.of(url, "tiny"), "bfloat16").readings(SHARED)


@pytest.fixture(scope="module")
def rounding(readings: list[Reading]) -> list[torch.Tensor]:
    """Return rounding errors of a server in bfloat16, those of the last copy with noise."""
    *_, changed = readings[0].witness.noisy()
    copy = Reader(computing_in(torch.bfloat16, changed))
    return [
        copy.logprobs(one.statement.ids, len(one.statement.prompt_ids), one.events) - one.masked for one in readings
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("answers", "detected"), [(4, True), (2, True), (1, False), (0, False)])
def test_two_answers_must_agree(
    readings: list[Reading], rounding: list[torch.Tensor], name: str, answers: int, detected: bool,
) -> None:
    """Give some answers the log-probabilities of a fault, and the others those of the statement."""
    for at, (reading, error) in enumerate(zip(readings, rounding, strict=True)):
        (fault,) = (one for one in hypotheses(reading.events, "kept") if one.name == name)
        logprobs = reading.read(*fault[1:]) if at < answers else reading.masked
        reading.__dict__["stated_logprobs"] = logprobs + error
    likelier_fault.cache_clear()
    compared = readings[:answers] if detected else readings
    assert likelier_fault(tuple(compared)) == (name if detected else "")


def test_a_difference_below_the_tolerance_is_a_fault_if_a_fault_explains_it(
    readings: list[Reading], rounding: list[torch.Tensor],
) -> None:
    for reading, error in zip(readings, rounding, strict=True):
        (fault,) = (one for one in hypotheses(reading.events, "kept") if one.name == NAMES[2])
        reading.__dict__["stated_logprobs"] = reading.read(*fault[1:]) + error
    likelier_fault.cache_clear()
    words = [verdict(RULES["masking"], reading) for reading in readings]
    bound = readings[0].witness.bound
    assert all(bound.apart(one.masked, one.stated_logprobs) < bound.tolerance for one in readings)
    assert all(NAMES[2] in one for one in words), words
