"""The blocks of a session: a prompt in pieces evicts at its end, and a text that is only read evicts nothing."""


from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

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
    Failing,
    Looking,
    T,
    batch,
    breathing,
    live_sets,
    method_of,
    now,
    prompts,
    sets,
    tokens,
)
from models_integration import CrystalCache, CustomPolicy, RetainedCache, Session
from models_integration.cache.crystal_states import Pending
from reference.policies import h2o, rkv, tova
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs

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


def test_scorers_see_the_queries_of_all_pieces() -> None:
    """All of them, the last of them, values, and every layer."""
    model, ids = build("llama", dtype=torch.float64), prompt(N)
    for needs in (Needs("observed", None, token_ids=True), Needs("all", 20, values=True), Needs("observed", 3)):
        shown = []
        for cut in ((N,), (30, 33, 1), (1, 2, 61)):
            scorer, cache = Looking(needs), RetainedCache(model.config)
            with method_of(scorer)(model) as run, run.prompt():
                for piece in torch.split(ids, list(cut), dim=1):
                    at_once(model, piece, cache)
            (observation,) = scorer.shown
            shown.append(observation)
        for other in shown[1:]:
            assert other.seen == N
            if needs.token_ids:
                np.testing.assert_array_equal(other.token_ids, shown[0].token_ids)
            assert other.layers.keys() == shown[0].layers.keys()
            for layer, view in shown[0].layers.items():
                for name in "qkv" if needs.values else "qk":
                    np.testing.assert_allclose(
                        getattr(other.layers[layer], name), getattr(view, name), atol=1e-12, rtol=0
                    )


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


@pytest.mark.law("the-model-stays-as-it-was")
def test_an_empty_block_changes_nothing() -> None:
    with METHODS["crystalcache"]()(build("llama")) as run:
        with run.prompt():
            pass
        assert run.cache is None


@pytest.mark.law("refused-before-anything-changes")
def test_a_block_belongs_inside_its_context_and_stands_alone() -> None:
    model = build("llama")
    run = METHODS["crystalcache"]()(model)
    with pytest.raises(SpecError, match="must be inside `with policy"), run.prompt():
        raise AssertionError
    with run:
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
@pytest.mark.parametrize(
    ("where", "error"), [("block", KeyboardInterrupt()), ("policy", RuntimeError("boom")), ("piece", RuntimeError())],
)
def test_a_prompt_that_is_left_half_way_leaves_no_usable_cache(where: str, error: BaseException) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    method = method_of(Failing(error)) if where == "policy" else METHODS["crystalcache"]()

    def fail(*_: object) -> None:
        raise error

    with method(model) as run:
        with pytest.raises(type(error)), run.prompt():
            at_once(model, prompt(N), cache)
            if where == "block":
                raise error
            if where == "piece":
                handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
                try:
                    at_once(model, prompt(5), cache)
                finally:
                    handle.remove()
        assert run.retention is None
        with pytest.raises(SpecError, match="unusable cache"):
            at_once(model, prompt(5), cache)
        if where != "policy":
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
def test_padding_that_changes_between_pieces_is_refused() -> None:
    model = build("llama")
    ids, mask = batch(prompts())
    cache = RetainedCache(model.config)
    other = mask.clone()
    other[0, :3] = 0
    with METHODS["crystalcache"]()(model) as run, run.prompt():
        at_once(model, ids[:, :30], cache, attention_mask=mask[:, :30])
        for wrong in (None, other, mask[:, 30:]):
            with pytest.raises(SpecError, match="attention_mask"):
                at_once(model, ids[:, 30:], cache, attention_mask=wrong)
        at_once(model, ids[:, 30:], cache, attention_mask=mask)
    assert sets(run)


@pytest.mark.law("refused-before-anything-changes")
def test_pieces_of_another_number_of_rows_are_refused() -> None:
    model = build("llama")
    cache = RetainedCache(model.config)
    with METHODS["crystalcache"]()(model) as run, run.prompt():
        at_once(model, prompt(2 * N).view(2, N), cache)
        with pytest.raises(SpecError, match="must have 2 rows, like the unfinished prompt"):
            at_once(model, prompt(4), cache)
    assert len(sets(run)) == 2


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
    (padded_question, "padding is not supported inside reading"),
    (generated, "must contain a prompt inside reading"),
    (nested, "must be inside `with policy"), (inside_a_prompt, "must be inside `with policy"),
    (around_a_prompt, "must be inside `with policy"), (before_a_prompt, "must contain a prompt inside reading"),
    (without_a_cache, "must contain a prompt inside reading"), (other_rows, "must have 1 rows, like the cache"),
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
    with pytest.raises(SpecError, match="must be inside `with policy"), run.reading():
        raise AssertionError


@pytest.mark.law("refused-before-anything-changes")
def test_a_stream_decides_about_all_that_it_reads() -> None:
    model = build("llama")
    with CrystalCache(20, ENDS, TINY, backend="numpy", stream=True)(model) as run:
        at_once(model, prompt(PROMPT), RetainedCache(model.config))
        with pytest.raises(SpecError, match="cannot be used in a stream"), run.reading():
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
