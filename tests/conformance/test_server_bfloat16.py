"""The witness on servers of SmolLM2 in bfloat16: right servers, and ten planted faults."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.server_suite.judge import RULES, Witness
from conformance.witness.client import Server
from models_integration.model.published_weights import located
from spec.errors import SpecError
from tests.conformance.server_verdicts import verdict
from tests.conformance.test_server_suite import Evicting, faults_of, serving

pytestmark = [pytest.mark.nightly, pytest.mark.law("the-proof-has-teeth")]

GROUPS = {"another request's set": "shared prefixes", "a cancelled request's set": "cancelled"}
"""Groups of requests that show a fault. The default is "recalled": the answers depend on evicted tokens."""
RULE = {"another set, as stated": "policy", "budget by one": "size", "fixed after the fact": "commitment"}
"""Rule that names a fault. The default is "masking"."""
FAULTS = (
    "a layer whole", "heads swapped", "another set, as stated", "another request's set", "a cancelled request's set",
    "slot numbers", "full log-probabilities", "no eviction", "budget by one", "fixed after the fact",
)
RIGHT = (("snapkv", 1), ("adakv", 2), ("knorm", 3), ('snapkv(positions="renumbered")', 4))
"""Policies of right servers, with random seeds of the prompts."""


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedModel:
    try:
        folder = located("smollm2")
    except SpecError as error:
        pytest.skip(str(error))
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


@pytest.fixture(scope="module")
def served(smollm2: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(smollm2).bfloat16()


def test_at_least_nine_of_ten_faults_are_named(smollm2: PreTrainedModel, served: PreTrainedModel) -> None:
    """Test servers that keep a fifth of each prompt. The first answer whose error names the fault is enough."""
    faults, named = faults_of(smollm2.config.num_hidden_layers, smollm2.config.num_key_value_heads), list[str]()
    for name in FAULTS:
        fault, words = faults[name]
        policy, check = "streamingllm" if fault.slots else "snapkv", RULES[RULE.get(name, "masking")]
        with serving(Evicting(served, policy, "0.2", fault)) as url:
            readings = Witness(smollm2, Server.of(url, "tiny"), "bfloat16").readings(GROUPS.get(name, "recalled"))
        outcome = next((one for reading in readings if words in (one := verdict(check, reading))), "")
        named += [name] * bool(outcome)
        print(f"{name}: {outcome or 'not named'}", flush=True)
    assert len(named) >= 9, named


@pytest.mark.parametrize(("policy", "seed"), RIGHT)
def test_a_right_server_is_not_accused(
    smollm2: PreTrainedModel, served: PreTrainedModel, policy: str, seed: int,
) -> None:
    with serving(Evicting(served, policy, "0.2")) as url:
        readings = Witness(smollm2, Server.of(url, "tiny"), "bfloat16", seed).readings("recalled")
    words = [(rule, verdict(check, reading)) for reading in readings for rule, check in RULES.items()
             if rule != "policy" or reading is readings[0]]
    print(policy, words, flush=True)
    assert {word for _, word in words} <= {"passed", "undecided"}, words
    assert ("masking", "passed") in words
