"""Unsupported models, and caches that cannot be continued, raise an error that names them before anything changes."""

import copy
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache, StaticCache

from models_integration import FullCache, RetainedCache, prefill
from models_integration.attention.capture import observing
from models_integration.cache.dense_layer import DenseLayer
from models_integration.model.architecture import describe
from reference.policies import h2o, with_adaptive_budgets
from spec.errors import SpecError
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import METHODS, VOCABULARY, at_once, build, greedy, prompt
from tests.models_integration.session.sessions import (
    PROMPT,
    batch,
    check_as_it_was,
    live_sets,
    method,
    prompts,
    read_prompt,
    snapshot,
)

pytestmark = pytest.mark.law("refused-before-anything-changes")

N = 40
Act = Callable[[Any], object]


def two_rows(mask: Tensor) -> dict[str, Any]:
    return {"input_ids": prompt(2 * N).view(2, N), "attention_mask": mask.long()}


def masked(shown: Tensor, **options: Any) -> dict[str, Any]:
    return {"input_ids": prompt(N), "attention_mask": shown.long()[None], **options}


AT = torch.arange(N)
FORWARDS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": prompt(1)}, "a single token is a decode step, not a segment"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.int64)}, "must not be empty"),
    (
        {"input_ids": torch.tensor([[5, VOCABULARY]])},
        rf"input_ids = {VOCABULARY}: must lie in \[0, {VOCABULARY}\)",
    ),
    ({"input_ids": torch.tensor([[5, -1, 7]])}, "input_ids = -1: must lie"),
    ({"input_ids": prompt(N).float()}, "must be an integer tensor"),
    ({"input_ids": prompt(N)[0]}, "must be an integer tensor"),
    ({"inputs_embeds": torch.randn(1, N, 48)}, "inputs_embeds = 'given'"),
    ({"input_ids": prompt(N), "use_cache": False}, "use_cache = False: must be True"),
    (masked(AT < N - 3), "pad on the left, because right padding and gaps are not supported"),
    (masked(AT != 3), "right padding and gaps are not supported"),
    (two_rows(torch.stack([torch.ones(N), AT != 7])), "right padding and gaps are not supported"),
    (masked(AT), "attention_mask = .*: must have only zeros and ones"),
    (two_rows(torch.tensor([[1], [0]]).expand(2, N)), "input_ids = '0 tokens': must have at least 2 tokens"),
    (masked(AT == N - 1), "input_ids = '1 tokens': must have at least 2 tokens"),
    (masked(AT > 3, position_ids=AT[None]), "position_ids"),
    (masked(torch.ones(1, N, N)), "must have a column for each token of the prompt"),
    ({"input_ids": prompt(N), "attention_mask": {"full_attention": None}}, "attention_mask = 'dict'"),
    ({"input_ids": prompt(N), "position_ids": torch.arange(2, N + 2)[None]}, "position_ids"),
    ({"input_ids": prompt(N), "position_ids": AT[None, None].expand(3, 1, N)}, "position_ids"),
    ({"input_ids": prompt(N), "past_key_values": ((), ())}, "past_key_values = 'tuple'"),
]


def foreign(kind: str, model: PreTrainedModel) -> Any:
    """Return a cache that cannot be compacted."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=64)
    if kind == "empty":
        return DynamicCache(config=model.config)
    if kind == "quantised":
        # The libraries of this cache are not installed. Only the class matters.
        return object.__new__(QuantizedCache)
    if kind == "foreign":
        return type("ForeignCache", (DynamicCache,), {})()
    cache: Any = DynamicCache(offloading=False)
    if kind == "offloaded":
        cache.offloading = True
    else:
        with torch.no_grad():
            model.get_decoder()(prompt(5), past_key_values=cache)  # type: ignore[no-untyped-call]
    return cache


CACHES: list[tuple[str, int, str]] = [
    ("static", N, "past_key_values = 'StaticCache': must be a RetainedCache"),
    ("quantised", N, "past_key_values = 'QuantizedCache'"), ("foreign", N, "past_key_values = 'ForeignCache'"),
    ("empty", N, "past_key_values = 'DynamicCache': .*leave out past_key_values for a new prompt"),
    ("offloaded", N, "past_key_values = 'DynamicCache': .*pass run.cache for a later turn"),
    *(("filled", n, "past_key_values = 'DynamicCache'") for n in (N, 1, 3)),
]
GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"prefill_chunk_size": 16, "token_healing": True}, "token_healing = True: .* changes the prompt"),
    *(({"cache_implementation": kind}, f"cache_implementation = '{kind}'") for kind in (
        "static", "offloaded", "quantized",
    )),
    ({"use_cache": False}, "use_cache = False"), ({"prompt_lookup_num_tokens": 3}, "assisted decoding"),
    ({"use_mtp": True}, "assisted decoding"), ({"guidance_scale": 2.0}, r"guidance_scale = 2\.0: must be None or 1"),
    ({"inputs_embeds": torch.zeros(1, N, 48)}, "inputs_embeds = 'Tensor'"),
]


def check_refused(calls: list[tuple[Act, str]], model: PreTrainedModel) -> None:
    """Check that each call raises an error inside a context, and that model and context are unchanged."""
    before = snapshot(model)
    expected = prefill(model, METHODS["crystalcache"](), prompt(N)).run.kept
    with METHODS["crystalcache"]()(model) as session:
        for act, words in calls:
            with pytest.raises(SpecError, match=words):
                act(model)
            assert (session.kept, session.cache) == (None, None)
        greedy(model, prompt(N), 2)
        assert expected is not None
        assert session.kept is not None
        assert session.kept.tolist() == expected.tolist()
    check_as_it_was(before, model)


def test_a_prompt_that_cannot_be_served_is_named() -> None:
    def read(given: dict[str, Any]) -> Act:
        return lambda model: model(**given)

    check_refused([(read(given), words) for given, words in FORWARDS], build("llama"))


def test_a_cache_that_cannot_be_compacted_is_named() -> None:
    model = build("llama")
    caches = [(foreign(kind, model), n, words) for kind, n, words in CACHES]
    before = [(type(cache), {**vars(cache)}) for cache, _, _ in caches]

    def read(cache: Any, n: int) -> Act:
        return lambda model: at_once(model, prompt(n), cache)

    def generate(cache: Any, n: int) -> Act:
        return lambda model: greedy(model, prompt(n + 6), 2, past_key_values=cache)

    check_refused([(act(cache, n), words) for act in (read, generate) for cache, n, words in caches], model)
    assert before == [(type(cache), vars(cache)) for cache, _, _ in caches]


def generating(options: dict[str, Any], where: str) -> Act:
    """Return a call of generate with options as arguments, in a config for the call, or in the config of the model."""
    def act(model: Any) -> None:
        config = GenerationConfig(**options, eos_token_id=None)  # type: ignore[no-untyped-call]
        given = {"argument": options, "own config": {"generation_config": config}, "model's config": {}}[where]
        with patch.object(model, "generation_config", config if where == "model's config" else model.generation_config):
            greedy(model, prompt(N), 2, **given)

    return act


WHERE = pytest.mark.parametrize("where", ["argument", "own config", "model's config"])


@WHERE
def test_ways_to_generate_that_are_not_served_are_named(where: str) -> None:
    rows = [row for row in GENERATE if where == "argument" or "inputs_embeds" not in row[0]]
    check_refused([(generating(options, where), words) for options, words in rows], build("llama"))


@pytest.mark.law("as-it-is-described")
def test_arguments_may_come_by_position_and_no_guidance_is_none() -> None:
    model = build("llama")
    expected = prefill(model, METHODS["crystalcache"](), prompt(N)).run.kept
    assert expected is not None
    with METHODS["crystalcache"]()(model) as run:
        model.base_model(prompt(N))
        assert run.kept is not None
        assert run.kept.tolist() == expected.tolist()
        with pytest.raises(SpecError, match="right padding"):
            model.base_model(prompt(N), (AT < 3).long()[None])
        greedy(model, prompt(N), 2, guidance_scale=1.0)


@pytest.mark.law("as-it-is-described")
@WHERE
def test_a_cache_that_transformers_takes_as_unsaid_is_no_cache(where: str) -> None:
    """Check names that transformers treats as no choice.

    Hub files of Gemma 2 and 3 have them, and the cache is dynamic.
    """
    model = build("gemma3")
    with METHODS["crystalcache"]()(model) as run:
        generating({"cache_implementation": "hybrid"}, where)(model)
    assert run.kept is not None


def other_attention(model: Any, name: str) -> Callable[[], object]:
    model.config._attn_implementation_internal = name
    return lambda: model.set_attn_implementation("sdpa")


def other_module(model: Any, name: str) -> Callable[[], object]:
    """Replace the second layer or its attention by a copy, and return a function that restores it."""
    layer = model.model.layers[1]
    holder, at, own = (model.model.layers, "1", layer) if name == "1" else (layer, name, layer.self_attn)
    setattr(holder, at, copy.deepcopy(own))
    return lambda: setattr(holder, at, own)


SWITCHES: list[tuple[Callable[[Any, str], Callable[[], object]], str, str]] = [
    *((other_attention, name, f"attn_implementation = '{name}': must be sdpa or eager") for name in (
        "flex_attention", "flash_attention_2",
    )),
    (other_module, "self_attn", r"the module 'self_attn' \(LlamaAttention\) was replaced"),
    (other_module, "1", r"the module '1' \(LlamaDecoderLayer\) was replaced"),
]


@pytest.mark.parametrize("name", ["crystalcache", "snapkv", "chunkkv"])
def test_what_is_switched_or_replaced_inside_is_named(name: str) -> None:
    """Check that the cache is unchanged: after the model is restored, a step can follow."""
    model: Any = build("llama")
    with method(name)(model):
        cache = RetainedCache(model.config)
        at_once(model, prompt(N), cache)
        for switch, value, words in SWITCHES:
            for text in (prompt(1), prompt(5)):
                back = switch(model, value)
                with pytest.raises(SpecError, match=words):
                    at_once(model, text, cache)
                back()
        assert cache.get_seq_length() == N
        at_once(model, prompt(1), cache)


def test_masks_that_ask_slot_by_slot_are_named_outside() -> None:
    """Check a mask that asks slot by slot, with scalars of vmap, as flex_attention does."""
    model = build("llama")
    cache = prefill(model, METHODS["crystalcache"](), prompt(N)).cache
    length, offset = cache.get_mask_sizes(3, 0)
    with pytest.raises(SpecError, match="attn_implementation = 'flex_attention': cannot read an evicted cache"):
        torch.vmap(lambda slot: slot + offset)(torch.arange(length))
    assert at_once(model, prompt(3), cache).shape[1] == 3


def test_contexts_do_not_nest_and_run_once() -> None:
    model = build("llama")
    method = METHODS["crystalcache"]()
    with method(model) as run:
        for given in (model, cast(PreTrainedModel, model.base_model)):
            with pytest.raises(SpecError, match="is already inside `with policy"), METHODS["streamingllm"]()(given):
                raise AssertionError
        with pytest.raises(SpecError, match="a session can be used once"), run:
            raise AssertionError
        greedy(model, prompt(N), 2)
        assert run.kept is not None
    with pytest.raises(SpecError, match="a session can be used once"), run:
        raise AssertionError
    with method(model) as again:
        greedy(model, prompt(N), 2)
    assert again.kept is not None


def heads(groups: int, seen: int = PROMPT, at: int = 3, kind: Granularity = Granularity.HEAD) -> Retention:
    """Return a retention in which each group keeps one position."""
    return Retention(torch.full((groups,), at).numpy(), torch.arange(groups + 1).numpy(), seen, kind)


RETENTIONS: list[tuple[Retention, str]] = [
    (heads(5), "5 groups"), (heads(3), "3 groups"), (heads(2, kind=Granularity.LAYER), "2 groups"),
    (heads(6, seen=40), "must cover all 64 tokens seen by the cache"), (heads(6, at=50), "must be among the"),
]


def ragged() -> tuple[RetainedCache, list[list[int]]]:
    """Return a cache of one prompt in which the heads keep different tokens, and the kept sets."""
    cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    sets = [[0, 3, 9, 60], [1, 9], [5, 63], [2, 3, 4], [0, 1, 2, 3, 4], [62]]
    offsets = np.cumsum([0, *map(len, sets)])
    cache.compact([Retention(np.concatenate(sets), offsets, PROMPT, Granularity.HEAD)])
    return cache, sets


@pytest.mark.parametrize("split", [False, True])
def test_a_retention_about_something_else_is_refused(split: bool) -> None:
    cache = ragged()[0] if split else prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    if not split:
        cast(DenseLayer, cache.full_layers[0]).retain(torch.arange(10))
    before, tensors = live_sets(cache), [layer.keys for layer in cache.full_layers]
    for retention, words in RETENTIONS:
        with pytest.raises(SpecError, match=words):
            cache.compact([retention])
    assert live_sets(cache) == before
    assert all(layer.keys is own for layer, own in zip(cache.full_layers, tensors, strict=True))


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("model_wide", [False, True])
def test_a_compaction_that_one_layer_refuses_changes_none(model_wide: bool) -> None:
    """Check a compaction after which all layers except the last store position 3."""
    cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    cast(DenseLayer, cache.full_layers[-1]).retain(torch.arange(10, 60))
    before = live_sets(cache)
    with pytest.raises(SpecError, match="must be among the"):
        cache.compact([Retention.shared(np.array([3]), PROMPT) if model_wide else heads(6)])
    assert live_sets(cache) == before


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    """Check heads of the first layer that could remove more tokens than the padded rows of the remaining layers."""
    model, mask = build("llama"), torch.tensor([[0] + [1] * (PROMPT - 1)])
    with FullCache()(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT), attention_mask=mask)
    cache = run.cache
    assert cache is not None
    sets = [range(40), range(30), *[range(20)] * 4]
    offsets = np.cumsum([0, *map(len, sets)])
    cache.compact([Retention(np.concatenate(sets), offsets, PROMPT - 1, Granularity.HEAD)])
    before = live_sets(cache)
    with pytest.raises(SpecError, match="must be at least -0, because the rows"):
        cache.crop(-40)
    for tokens in (1, -70):
        with pytest.raises(SpecError, match="tokens_to_remove"):
            cache.full_layers[0].crop(tokens)
    assert live_sets(cache) == before
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("name", ["adakv", "chunkkv", "crystalcache"])
def test_what_differs_can_be_read_inside_the_context_only(name: str) -> None:
    """Check different layers or heads of one row, and different rows."""
    model, rows = build("llama"), 3 if name == "crystalcache" else 1
    ids, mask = batch(prompts()) if rows > 1 else (prompt(PROMPT), torch.ones(1, PROMPT, dtype=torch.int64))
    cache = RetainedCache(model.config)
    with method(name)(model):
        at_once(model, ids, cache, attention_mask=mask)
    before = live_sets(cache)
    for n in (1, 3):
        with pytest.raises(SpecError, match="can be used only inside `with policy"):
            at_once(model, prompt(n).repeat(rows, 1), cache)
    assert live_sets(cache) == before


def test_a_4d_mask_and_weights_know_nothing_of_heads() -> None:
    model = build("llama", attention="eager")
    with method("adakv")(model) as run, torch.no_grad():
        first = model(input_ids=prompt(PROMPT), output_attentions=True)
        assert [tuple(one.shape) for one in first.attentions] == [(1, 4, PROMPT, PROMPT)] * 3
        assert run.cache is not None
        before = live_sets(run.cache)
        with pytest.raises(SpecError, match="because the heads store different tokens"):
            model(input_ids=prompt(1), past_key_values=run.cache, output_attentions=True)
        assert live_sets(run.cache) == before
    mask = torch.ones(1, 1, 8, 27, dtype=torch.bool)
    with observing(describe(model), run.cache), torch.no_grad(), pytest.raises(SpecError, match="attention_mask"):
        model(input_ids=prompt(8), past_key_values=run.cache, attention_mask=mask)


def grown_elsewhere(cache: RetainedCache) -> None:
    model = build("llama")
    with observing(describe(model), cache):
        at_once(model, prompt(1), cache)


SPOILED: list[tuple[str, Act]] = [
    ("tova", lambda cache: None), ("h2o", grown_elsewhere), ("h2o", lambda cache: cache.crop(-1)),
]


@pytest.mark.parametrize(("name", "spoil"), SPOILED)
def test_a_policy_goes_on_from_its_own_records_only(name: str, spoil: Act) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method(name))
    spoil(cache)
    with method("h2o")(model), torch.no_grad(), pytest.raises(SpecError, match="tokens without records"):
        model(input_ids=prompt(1), past_key_values=cache)


def test_steps_need_equal_shares() -> None:
    with pytest.raises(SpecError, match="needs equal shares, but the budgets Adaptive"):
        with_adaptive_budgets(h2o())


def test_a_window_above_the_budget_or_a_budget_above_the_prompt_is_served() -> None:
    model = build("llama")
    run, cache = read_prompt(model, method("snapkv", 3))
    assert (cache.mean_length, run.over_budget) == (8, 5)
    assert read_prompt(model, method("snapkv", 1.0), 5)[1].mean_length == 5
