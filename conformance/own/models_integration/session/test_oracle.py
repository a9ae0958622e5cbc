"""Eviction equals masking: the compacted cache against the full one with minus infinity on what was evicted."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from conformance.assurance.faults import WELL
from conformance.own.models_integration.session.crossings import crossed
from conformance.own.models_integration.session.families import (
    ENDS,
    FAMILIES,
    METHODS,
    SLIDING,
    WINDOW,
    Masked,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from conformance.own.models_integration.session.oracle_checks import PROMPT, check_hidden_token
from conformance.own.models_integration.session.running_cache import POLICIES
from conformance.own.models_integration.session.test_session_machine import SessionMachine
from models_integration import CrystalCache, prefill

pytestmark = pytest.mark.law("eviction-equals-masking")


def converse(machine: SessionMachine, policy: str) -> None:
    """Prompt, steps, a turn in pieces, generate, a file, and some tokens outside the context."""
    life: Any = machine.prompt(policy, 45)
    machine.steps(life, 9)
    machine.turn(life, 12, cuts=() if policy == "stream" else (5,))
    machine.generate(life, 5, 6)
    machine.reading(life, 2)
    machine.crop(life, 1)
    machine.save(life, WELL)
    machine.steps(life, 3)
    machine.outside(life, 4)
    assert not life.dead
    assert life.tokens > 45 + 9


def converse_in_rows(machine: SessionMachine, policy: str) -> None:
    """Rows of different lengths: some part again in a turn; then they change places, are taken out and repeated."""
    life = machine.prompt(policy, 45, rows=3, padding=(20, 0, 1))
    machine.steps(life, 4)
    machine.crop(life, 2)
    machine.turn(life, 12, padding=(5, 0, 1))
    other = machine.copy(life)
    machine.choose_rows(life, "reorder", [1, 1, 0])
    machine.steps(life, 4)
    machine.choose_rows(other, "select", [1, 0, 0])
    machine.choose_rows(other, "repeat", [])
    machine.steps(other, 2)
    machine.steps(life, 1)


def run(program: Callable[[SessionMachine], None], family: str = "llama") -> Counter[str]:
    """A program on a new machine; what it has met."""
    met = Counter[str]()
    machine = SessionMachine(family, met)
    try:
        program(machine)
    finally:
        machine.teardown()
    return met


@crossed("policy", POLICIES, always=["breathing", "stream"], whole=("llama",))
@pytest.mark.spec("CC-COMPACT")
def test_a_conversation_equals_the_masked_model(family: str, policy: str) -> None:
    """Of each family and each policy."""
    met = run(partial(converse, policy=policy), family)
    assert (met["a segment that evicts"] > 0) == (policy != "fullcache")
    assert policy not in ("breathing", "stream", "h2o", "tova", "rkv") or met["a step that evicts"] > 0


@crossed("policy", ["crystalcache", "streamingllm", "adakv", "breathing"])
def test_rows_equal_the_masked_model(family: str, policy: str) -> None:
    run(partial(converse_in_rows, policy=policy), family)


@pytest.mark.parametrize(("family", "policy"), [("llama", "adakv"), ("gemma3", "breathing")])
def test_eager_attention_is_served_as_it_is(family: str, policy: str) -> None:
    run(partial(converse, policy=policy), f"{family} eager")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SLIDING])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_2d_mask_counts_tokens_and_not_slots(family: str, attention: str) -> None:
    check_hidden_token(build(family, attention=attention), METHODS["crystalcache"]())


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers_are_never_compacted(family: str) -> None:
    model = build(family)
    prefilled = prefill(model, METHODS["crystalcache"](), prompt(PROMPT))
    lengths = [layer.keys.shape[2] for layer in prefilled.cache.layers]  # type: ignore[union-attr]
    kept = prefilled.cache.stored_length
    assert kept < PROMPT
    assert lengths == [WINDOW - 1, kept, WINDOW - 1, kept]
    assert prefilled.cache.get_seq_length() == PROMPT
    assert [layer.get_seq_length() for layer in prefilled.cache.layers] == [PROMPT] * 4  # type: ignore[union-attr]


def test_generate_goes_on_outside_the_context() -> None:
    model, ids, following = build("llama"), prompt(PROMPT), prompt(5, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    oracle = Masked(model, ids, cache.stored_positions().tolist())
    chosen = [int(oracle.read(following)[0, -1].argmax())]
    while len(chosen) < 6:
        chosen.append(int(oracle.read(torch.tensor([[chosen[-1]]]))[0, -1].argmax()))
    whole = torch.cat([ids, following], dim=1)
    assert greedy(model, whole, 6, past_key_values=cache)[0].tolist() == chosen


def test_the_paper_s_parameters_on_a_longer_prompt() -> None:
    model, ids, following = build("llama"), prompt(300), prompt(8, seed=9)
    prefilled = prefill(model, CrystalCache(0.6, ENDS, backend="numpy"), ids)
    kept = prefilled.cache.stored_positions().tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-128:] == list(range(300 - 128, 300))
    expected = Masked(model, ids, kept).read(following)
    assert relative(at_once(model, following, copy.deepcopy(prefilled.cache)), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_served(dtype: torch.dtype) -> None:
    model, ids, following = build("llama", dtype=dtype), prompt(PROMPT), prompt(8, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    expected = Masked(model, ids, cache.stored_positions().tolist()).read(following)
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    assert relative(at_once(model, following, cache), expected) < tolerance
