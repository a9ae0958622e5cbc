"""`with run.reading():` reads and decides nothing: what it leaves is the full cache under the masks of before."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import (
    ENDS,
    METHODS,
    at_once,
    build,
    greedy,
    prompt,
    states_of,
)
from conformance.own.models_integration.session.sessions import (
    PROMPT,
    SHORT,
    T,
    breathing,
    live_sets,
    now,
    tokens,
)
from models_integration import CrystalCache, CustomPolicy, RetainedCache, Session
from models_integration.cache.crystal_states import Pending
from reference.policies import h2o, rkv, tova
from spec.errors import SpecError
from spec.parameters import TINY

pytestmark = pytest.mark.law("eviction-equals-masking")

@pytest.mark.spec("PO-READ")
def test_read_tokens_are_no_steps() -> None:
    """D does not decay and no breath comes nearer; the breath comes with its step, and finds them in the tail."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with breathing()(model) as run:
        at_once(model, prompt(PROMPT), cache)
        for token in torch.split(tokens(2), 1, dim=1):
            at_once(model, token, cache)
        before = now(cache)[0]
        with run.reading():
            at_once(model, prompt(2 * T + 1, seed=4), cache)
            for token in torch.split(tokens(T), 1, dim=1):
                at_once(model, token, cache)
        assert states_of(cache).kind is Pending.READ
        after = now(cache)[0]
        assert np.array_equal(after.D, before.D)
        assert after.step == before.step == 2
        assert len(after.tail_ids) == 2 + 3 * T + 1
        stored = cache.stored_length
        for token in torch.split(tokens(T - 3), 1, dim=1):
            at_once(model, token, cache)
        assert cache.stored_length == stored + T - 3
        assert now(cache)[0].tail_ids
        at_once(model, tokens(1), cache)
        (state,) = states_of(cache).rows
    assert state.step == T == SHORT.T_breath
    assert state.tail_ids == ()
    assert cache.stored_length < stored


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("policy", [h2o, tova, lambda: rkv(W=4, every=3)], ids=["h2o", "tova", "rkv"])
def test_sums_take_up_what_was_read(policy: Callable[[], Any]) -> None:
    """A turn behind a text that was read keeps what a turn over both would: nothing was evicted between them."""
    model, found = build("llama"), []
    for reads in (True, False):
        with CustomPolicy(policy(), 0.3)(model) as run:
            cache = RetainedCache(model.config)
            at_once(model, prompt(PROMPT), cache)
            around = run.reading() if reads else run.prompt()
            with around:
                at_once(model, prompt(6, seed=7), cache)
                if not reads:
                    at_once(model, prompt(8, seed=8), cache)
            if reads:
                at_once(model, prompt(8, seed=8), cache)
            found.append(live_sets(cache))
    assert found[0] == found[1]


def padded_question(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    mask = torch.ones(1, PROMPT + 4, dtype=torch.int64)
    mask[0, PROMPT] = 0
    with run.reading():
        at_once(model, prompt(4), cache, attention_mask=mask)


def generated(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.reading():
        greedy(model, prompt(5), 2)


def nested(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.reading(), run.reading():
        raise AssertionError


def inside_a_prompt(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.prompt(), run.reading():
        raise AssertionError


def around_a_prompt(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.reading(), run.prompt():
        raise AssertionError


def before_a_prompt(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.reading():
        at_once(model, prompt(4), RetainedCache(model.config))


def without_a_cache(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.reading():
        model(input_ids=prompt(4))


def other_rows(model: PreTrainedModel, run: Session, cache: RetainedCache) -> None:
    with run.reading():
        at_once(model, prompt(4).repeat(2, 1), cache)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("wrong", "words"), [
    (padded_question, "padding is not served inside reading"),
    (generated, "needs a cache that has read a prompt"),
    (nested, "belongs inside the context"), (inside_a_prompt, "belongs inside the context"),
    (around_a_prompt, "belongs inside the context"), (before_a_prompt, "needs a cache that has read a prompt"),
    (without_a_cache, "needs a cache that has read a prompt"), (other_rows, "the cache has 1 rows"),
])
def test_what_is_no_reading_is_refused_and_changes_nothing(
    wrong: Callable[[PreTrainedModel, Session, RetainedCache], None], words: str,
) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        at_once(model, prompt(PROMPT), cache)
        before = live_sets(cache)
        with pytest.raises(SpecError, match=words):
            wrong(model, run, cache)
        assert live_sets(cache) == before
        with run.reading():
            at_once(model, prompt(4), cache)
    with pytest.raises(SpecError, match="belongs inside the context"), run.reading():
        raise AssertionError


@pytest.mark.law("refused-before-anything-changes")
def test_a_stream_decides_about_all_that_it_reads() -> None:
    model = build("llama")
    with CrystalCache(20, ENDS, TINY, backend="numpy", stream=True)(model) as run:
        at_once(model, prompt(PROMPT), RetainedCache(model.config))
        with pytest.raises(SpecError, match="no block can hold one open"), run.reading():
            raise AssertionError


@pytest.mark.law("refused-before-anything-changes")
def test_records_of_another_policy_and_states_that_do_not_know_all_are_refused() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model):
        at_once(model, prompt(PROMPT), cache)
        at_once(model, prompt(1), cache)
    with CustomPolicy(h2o(), 0.3)(model) as run, run.reading(), pytest.raises(SpecError, match="without records"):
        at_once(model, prompt(3), cache)
    at_once(model, prompt(1), cache)
    crystalcache = METHODS["crystalcache"]()
    with crystalcache(model) as run, run.reading(), pytest.raises(SpecError, match="do not cover all of them"):
        at_once(model, prompt(3), cache)
