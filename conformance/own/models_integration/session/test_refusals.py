"""What is not served is refused by name, before anything changes: tables of calls and of words of their errors."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache, StaticCache

from conformance.own.models_integration.session.families import METHODS, VOCABULARY, at_once, build, greedy, prompt
from conformance.own.models_integration.session.sessions import (
    check_as_it_was,
    method,
    snapshot,
)
from models_integration import RetainedCache, prefill
from spec.errors import SpecError

pytestmark = pytest.mark.law("refused-before-anything-changes")

N = 40
Act = Callable[[Any], object]


def two_rows(mask: Tensor) -> dict[str, Any]:
    return {"input_ids": prompt(2 * N).view(2, N), "attention_mask": mask.long()}


def masked(shown: Tensor, **options: Any) -> dict[str, Any]:
    return {"input_ids": prompt(N), "attention_mask": shown.long()[None], **options}


AT = torch.arange(N)
FORWARDS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": prompt(1)}, "one query is a decode step, not a segment"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.int64)}, "must not be empty"),
    (
        {"input_ids": torch.tensor([[5, VOCABULARY]])},
        rf"input_ids = {VOCABULARY}: must lie in \[0, {VOCABULARY}\)",
    ),
    ({"input_ids": torch.tensor([[5, -1, 7]])}, "input_ids = -1: must lie"),
    ({"input_ids": prompt(N).float()}, "must be an integer tensor"),
    ({"input_ids": prompt(N)[0]}, "must be an integer tensor"),
    ({"inputs_embeds": torch.randn(1, N, 48)}, "inputs_embeds = 'given'"),
    ({"input_ids": prompt(N), "use_cache": False}, "use_cache = False: must be on"),
    (masked(AT < N - 3), "must be left of all ones: pad on the left, right padding and holes are not served"),
    (masked(AT != 3), "right padding and holes are not served"),
    (two_rows(torch.stack([torch.ones(N), AT != 7])), "right padding and holes are not served"),
    (masked(AT), "attention_mask = .*: must hold zeros and ones only"),
    (two_rows(torch.tensor([[1], [0]]).expand(2, N)), "input_ids = '0 tokens': one query is a decode step"),
    (masked(AT == N - 1), "input_ids = '1 tokens': one query is a decode step"),
    (masked(AT > 3, position_ids=AT[None]), "position_ids"),
    (masked(torch.ones(1, N, N)), "must have a column for each token of the prompt"),
    ({"input_ids": prompt(N), "attention_mask": {"full_attention": None}}, "attention_mask = 'dict'"),
    ({"input_ids": prompt(N), "position_ids": torch.arange(2, N + 2)[None]}, "position_ids"),
    ({"input_ids": prompt(N), "position_ids": AT[None, None].expand(3, 1, N)}, "position_ids"),
    ({"input_ids": prompt(N), "past_key_values": ((), ())}, "past_key_values = 'tuple'"),
]


def foreign(kind: str, model: PreTrainedModel) -> Any:
    """A cache that cannot be compacted."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=64)
    if kind == "quantised":
        # Its libraries are not installed here; the class is what counts.
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
    ("static", N, "past_key_values = 'StaticCache': must be a DynamicCache"),
    ("quantised", N, "past_key_values = 'QuantizedCache'"), ("foreign", N, "past_key_values = 'ForeignCache'"),
    ("offloaded", N, "an offloaded cache cannot be compacted"),
    *(("filled", n, "past_key_values = '5 tokens': must be empty before a prompt") for n in (N, 1, 3)),
]
GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"prefill_chunk_size": 16, "token_healing": True}, "token_healing = True: changes the prompt's length"),
    *(({"cache_implementation": kind}, f"cache_implementation = '{kind}'") for kind in (
        "static", "offloaded", "quantized",
    )),
    ({"use_cache": False}, "use_cache = False"), ({"prompt_lookup_num_tokens": 3}, "assisted decoding"),
    ({"use_mtp": True}, "assisted decoding"), ({"guidance_scale": 2.0}, r"guidance_scale = 2\.0: is not served"),
    ({"inputs_embeds": torch.zeros(1, N, 48)}, "inputs_embeds = 'Tensor'"),
]


def check_refused(calls: list[tuple[Act, str]], model: PreTrainedModel) -> None:
    """Each call is refused inside a context; model and context go on as if none had been made."""
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
    kinds = [type(cache) for cache, _, _ in caches]

    def read(cache: Any, n: int) -> Act:
        return lambda model: at_once(model, prompt(n), cache)

    check_refused([(read(cache, n), words) for cache, n, words in caches], model)
    assert kinds == [type(cache) for cache, _, _ in caches]


@pytest.mark.parametrize("where", ["argument", "own config"])
def test_ways_to_generate_that_are_not_served_are_named(where: str) -> None:
    def generate(options: dict[str, Any]) -> Act:
        if where == "own config" and "inputs_embeds" not in options:
            options = {"generation_config": GenerationConfig(**options)}  # type: ignore[no-untyped-call]
        return lambda model: greedy(model, prompt(N), 2, **options)

    check_refused([(generate(options), words) for options, words in GENERATE], build("llama"))


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


def test_a_model_s_own_generation_settings_count() -> None:
    model = build("llama")
    assert model.generation_config is not None
    model.generation_config.prompt_lookup_num_tokens = 3
    with METHODS["crystalcache"]()(model), pytest.raises(SpecError, match="assisted decoding"):
        greedy(model, prompt(N), 2)


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("where", ["own config", "argument", "model's config"])
def test_a_cache_that_transformers_takes_as_unsaid_is_no_cache(where: str) -> None:
    """Hub files of Gemma 2 and 3 say so; the cache is a dynamic one."""
    model = build("gemma3")
    options: dict[str, Any] = {"cache_implementation": "hybrid"}
    if where == "own config":
        options = {"generation_config": GenerationConfig(**options, eos_token_id=None)}  # type: ignore[no-untyped-call]
    elif where == "model's config":
        assert model.generation_config is not None
        model.generation_config.cache_implementation, options = "hybrid", {}
    with METHODS["crystalcache"]()(model) as run:
        greedy(model, prompt(N), 2, **options)
    assert run.kept is not None


def other_attention(model: Any, name: str) -> Callable[[], object]:
    model.config._attn_implementation_internal = name
    return lambda: model.set_attn_implementation("sdpa")


def other_module(model: Any, name: str) -> Callable[[], object]:
    """A copy of the second layer, or of its attention, in its place."""
    layer = model.model.layers[1]
    holder, at, own = (model.model.layers, "1", layer) if name == "1" else (layer, name, layer.self_attn)
    setattr(holder, at, copy.deepcopy(own))
    return lambda: setattr(holder, at, own)


SWITCHES: list[tuple[Callable[[Any, str], Callable[[], object]], str, str]] = [
    *((other_attention, name, f"attn_implementation = '{name}': must be sdpa or eager") for name in (
        "flex_attention", "flash_attention_2",
    )),
    (other_module, "self_attn", "its 'self_attn', a LlamaAttention, was replaced"),
    (other_module, "1", "its '1', a LlamaDecoderLayer, was replaced"),
]


@pytest.mark.parametrize("name", ["crystalcache", "snapkv", "chunkkv"])
def test_what_is_switched_or_replaced_inside_is_named(name: str) -> None:
    """And the cache is as it was: a step follows once the model has its own again."""
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
    """As those of flex_attention do, over scalars that vmap makes."""
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
            with pytest.raises(SpecError, match="contexts do not nest"), METHODS["streamingllm"]()(given):
                raise AssertionError
        with pytest.raises(SpecError, match="a session runs once"), run:
            raise AssertionError
        greedy(model, prompt(N), 2)
        assert run.kept is not None
    with pytest.raises(SpecError, match="a session runs once"), run:
        raise AssertionError
    with method(model) as again:
        greedy(model, prompt(N), 2)
    assert again.kept is not None
