"""Error rates of the witness, for servers with true statements and for servers without statements."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from conformance.server_suite.judge import RULES, Reading, Witness
from conformance.witness.client import Answer, Server
from models_integration.policies import methods
from models_integration.policies.methods import constants_of
from reference.backend import BACKEND as REFERENCE
from reference.policies.names import NAMES
from tests.conformance.server_verdicts import verdict
from tests.conformance.test_server_suite import FAULTS, Evicting, Fault, serving

pytestmark = pytest.mark.nightly

GROUPS = ("shared prefixes", "recalled", "at once")
"""Groups with 15 requests in all. `Evicting` cannot observe the prompts of 2 ids of the group "lengths"."""
POLICIES = ("snapkv", "streamingllm", "chunkkv", "adakv", 'snapkv(positions="renumbered")', "knorm")
SILENT = "eviction, without the statement"


def readings(model: PreTrainedModel, servers: int, fault: Fault, states: bool) -> Iterator[tuple[str, Reading]]:
    """Yield a name and the reading of each request. Each server has a different policy, budget and prompts."""
    for seed in range(servers):
        budget = ("0.4", "0.6")[seed // len(POLICIES) % 2]
        engine = Evicting(model, POLICIES[seed % len(POLICIES)], budget, fault, states=states)
        with serving(engine) as url:
            witness = Witness(model, Server.of(url, "tiny"), seed=seed)
            for group in GROUPS:
                for at, reading in enumerate(witness.readings(group)):
                    yield f"{engine.policy} at {budget}, seed {seed}, {group} {at}", reading


@pytest.fixture(scope="module")
def right(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Return the verdict of each rule on 1 005 answers of servers whose statements are true."""
    result = {}
    for name, reading in readings(model, 67, Fault(), states=True):
        result[name] = {rule: verdict(check, reading) for rule, check in RULES.items()}
        silent = Reading(reading.witness, replace(reading.answer, stated=None))
        result[name][SILENT] = verdict(RULES["eviction"], silent)
    return result


def accused(verdicts: dict[str, str]) -> bool:
    return bool(set(verdicts.values()) - {"passed", "undecided"})


def test_of_a_thousand_right_requests_at_most_one_is_accused(right: dict[str, dict[str, str]]) -> None:
    wrong = {name: verdicts for name, verdicts in right.items() if accused(verdicts)}
    decided = Counter(rule for verdicts in right.values() for rule, word in verdicts.items() if word == "passed")
    print(len(right), decided, wrong)
    assert len(right) >= 1_000
    assert len(wrong) <= 1, wrong
    assert all(decided[rule] >= 0.9 * len(right) for rule in ("size", "masking", "eviction", "policy", SILENT)), decided


def test_a_full_cache_without_statements_is_not_taken_for_eviction(model: PreTrainedModel) -> None:
    """Check a server that evicts nothing and states nothing. No answer may pass as an eviction."""
    fault = FAULTS["no eviction"][0]
    words = [verdict(RULES["eviction"], reading) for _, reading in readings(model, 22, fault, states=False)]
    counts = Counter("accused" if word not in ("passed", "undecided") else word for word in words)
    print(counts)
    assert counts.total() >= 330
    assert counts["passed"] == 0, counts
    assert counts["accused"] >= 0.9 * counts.total(), counts


STATED = tuple(name for name in NAMES if name != "fullcache" and not {"calibration", "template"} & constants_of(name))
"""Policies whose constants a server can state."""
REPEATED = ((3, 150), (2, 100), (8, 200), (20, 160))
"""Number of different ids and of tokens of prompts. Equal tokens often have equal scores."""


def test_equal_tokens_accuse_no_policy(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check rule 4 for a server in float64, whose rounding ranks equal tokens differently."""
    monkeypatch.setattr(methods, "fastest", lambda *names: REFERENCE)
    exact, witness, words = copy.deepcopy(model).double(), Witness(model, Server("", "tiny")), dict[str, str]()
    for name in STATED:
        policy = f"{name}(sentence_ends=[200])" if "sentence_ends" in constants_of(name) else name
        for seed, (kinds, n) in enumerate(REPEATED):
            answer = Answer(np.random.default_rng(seed).choice(range(200, 200 + kinds), n).tolist())
            for event in Evicting(exact, policy).answer(answer.prompt_ids, 2, seed):
                answer.take(event)
            words[f"{policy}, {kinds} of {n}"] = verdict(RULES["policy"], Reading(witness, answer))
    counts = Counter(word if word in ("passed", "undecided") else "accused" for word in words.values())
    print(counts, {name: word for name, word in words.items() if word != "passed"})
    assert counts.total() >= 250
    assert counts["accused"] == 0
    assert counts["passed"] >= 0.8 * counts.total()
