"""The blocks of a session: a prompt in pieces evicts at its end, and a text that is only read evicts nothing."""


from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from conformance.own.models_integration.session.families import (
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
    batch,
    breathing,
    live_sets,
    now,
    prompts,
    sets,
    tokens,
)
from models_integration import CustomPolicy, RetainedCache
from models_integration.cache.crystal_states import Pending
from reference.policies import h2o, rkv, tova
from spec.errors import SpecError

pytestmark = pytest.mark.law("parts-equal-the-whole")

N, NEW = 64, 6

@pytest.mark.parametrize("chunk", [16, 100])
def test_a_model_s_own_chunk_size_counts(chunk: int) -> None:
    model, ids = build("llama"), prompt(N)
    expected = greedy(model, ids, NEW)
    assert model.generation_config is not None
    model.generation_config.prefill_chunk_size = chunk
    with METHODS["fullcache"]()(model) as run:
        assert torch.equal(greedy(model, ids, NEW), expected)
    assert run.kept is not None
    assert len(run.kept) == N


def test_the_cache_may_be_left_to_the_session() -> None:
    model, ids = build("llama"), prompt(N)
    with METHODS["crystalcache"]()(model) as run:
        with run.prompt(), torch.no_grad():
            cache: RetainedCache = model(input_ids=ids[:, :30]).past_key_values
            with pytest.raises(SpecError, match="must be the cache of the unfinished prompt"):
                model(input_ids=ids[:, 30:])
            with pytest.raises(SpecError, match="must be the cache of the unfinished prompt"):
                model(input_ids=ids[:, 30:], past_key_values=DynamicCache())
            model(input_ids=ids[:, 30:], past_key_values=cache)
        assert id(run.cache) == id(cache)
        assert run.kept is not None
        kept = len(run.kept)
        at_once(model, prompt(1), cache)
        assert cache.stored_length == kept + 1


@pytest.mark.law("refused-before-anything-changes")
def test_a_block_belongs_inside_its_context_and_stands_alone() -> None:
    model = build("llama")
    run = METHODS["crystalcache"]()(model)
    with pytest.raises(SpecError, match="must be inside `with policy"), run.prompt():
        raise AssertionError
    with run:
        with run.prompt():
            pass
        assert run.cache is None
        with run.prompt():
            with pytest.raises(SpecError, match="must be inside `with policy"), run.prompt():
                raise AssertionError
            with pytest.raises(SpecError, match="processes a separate prompt"):
                greedy(model, prompt(N), 2)
        greedy(model, prompt(N), 2)
        assert run.kept is not None
    with pytest.raises(SpecError, match="must be inside `with policy"), run.prompt():
        raise AssertionError


@pytest.mark.law("refused-before-anything-changes")
def test_a_prompt_of_one_token_is_no_segment() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        with pytest.raises(SpecError, match="a single token is a decode step"), run.prompt():
            at_once(model, prompt(1), cache)
        with pytest.raises(SpecError, match="unusable cache"):
            at_once(model, prompt(5), cache)


@pytest.mark.law("unusable-after-a-failure")
def test_a_prompt_that_is_left_half_way_leaves_no_usable_cache() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        with pytest.raises(KeyboardInterrupt), run.prompt():
            at_once(model, prompt(N), cache)
            raise KeyboardInterrupt
        assert run.retention is None
        with pytest.raises(SpecError, match="unusable cache"):
            at_once(model, prompt(5), cache)
        greedy(model, prompt(N), 2)
        assert run.kept is not None


@pytest.mark.law("unusable-after-a-failure")
def test_a_context_that_ends_inside_a_block_leaves_no_usable_cache() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    run = METHODS["crystalcache"]()(model)
    run.__enter__()
    block = run.prompt()
    block.__enter__()
    at_once(model, prompt(N), cache)
    run.__exit__(None, None, None)
    with pytest.raises(SpecError, match="block ended inside a prompt"):
        cache.get_seq_length()


@pytest.mark.law("refused-before-anything-changes")
def test_pieces_of_other_padding_or_rows_are_refused() -> None:
    model, (ids, mask), none = build("llama"), batch(prompts()), torch.zeros(3, 3, dtype=torch.int64)
    cache = RetainedCache(model.config)
    with METHODS["crystalcache"]()(model) as run, run.prompt():
        at_once(model, ids[:, :30], cache, attention_mask=mask[:, :30])
        for wrong in (None, torch.cat([none, mask[:, 3:]], dim=1), mask[:, 30:]):
            with pytest.raises(SpecError, match="attention_mask"):
                at_once(model, ids[:, 30:], cache, attention_mask=wrong)
        with pytest.raises(SpecError, match="must have 3 rows, like the unfinished prompt"):
            at_once(model, prompt(4), cache)
        at_once(model, ids[:, 30:], cache, attention_mask=mask)
    assert len(sets(run)) == 3


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


HIDING = {"attention_mask": (torch.arange(PROMPT + 4) != PROMPT).long()[None]}
# Blocks, what happens inside them, words of the error.
NO_READING: list[tuple[tuple[str, ...], Callable[[Any, RetainedCache], object], str]] = [
    (("reading",), lambda model, cache: at_once(model, prompt(4), cache, **HIDING), "padding is not supported inside"),
    (("reading",), lambda model, cache: greedy(model, prompt(5), 2), "must contain a prompt inside reading"),
    (("reading",), lambda model, cache: model(input_ids=prompt(4)), "must contain a prompt inside reading"),
    (("reading",), lambda model, cache: at_once(model, prompt(4), RetainedCache(model.config)), "must contain a "),
    (("reading",), lambda model, cache: at_once(model, prompt(4).repeat(2, 1), cache), "must have 1 rows"),
    *((blocks, lambda model, cache: None, "must be inside `with policy") for blocks in (
        ("reading", "reading"), ("prompt", "reading"), ("reading", "prompt"),
    )),
]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("blocks", "act", "words"), NO_READING)
def test_what_is_no_reading_is_refused_and_changes_nothing(
    blocks: tuple[str, ...], act: Callable[[Any, RetainedCache], object], words: str,
) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        at_once(model, prompt(PROMPT), cache)
        before = live_sets(cache)
        with pytest.raises(SpecError, match=words), ExitStack() as stack:
            for block in blocks:
                stack.enter_context(getattr(run, block)())
            act(model, cache)
        assert live_sets(cache) == before
        with run.reading():
            at_once(model, prompt(4), cache)
    with pytest.raises(SpecError, match="must be inside `with policy"), run.reading():
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
