"""Unsupported models, arguments and caches raise an error with the true reason before anything is read or changes.

Wrappers of models are supported.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache, StaticCache
from transformers.models.ctrl import modeling_ctrl
from transformers.models.llama import modeling_llama

from models_integration import FullCache, RetainedCache, RetentionPolicy, StreamingLLM, observe, prefill
from models_integration.archive.layer_masks import layer_masks
from models_integration.attention.capture import AttentionInputs, Recorder, observing
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import CACHE
from reference.policies import h2o, with_adaptive_budgets
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import (
    _GQA,
    _SIZES,
    METHODS,
    SMALL,
    VOCABULARY,
    WINDOW,
    at_once,
    build,
    greedy,
    prepare,
    prepared,
    prompt,
    relative,
    tiny,
)
from tests.models_integration.session.masked import Masked
from tests.models_integration.session.sessions import (
    PROMPT,
    check_as_it_was,
    check_continuation,
    live_sets,
    method,
    read_prompt,
    skip_without_attention,
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
    ({"input_ids": prompt(1)}, "a single token is a decode step: add a token"),
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


@pytest.mark.parametrize(("name", "size"), [
    ("num_hidden_layers", 5), ("num_key_value_heads", 1), ("head_dim", 8), ("sliding_window", 5),
])
def test_a_cache_of_a_model_of_other_sizes_is_named(name: str, size: int) -> None:
    """A model would use the layers that fit, or fail after its first layers have changed the cache."""
    model = build("llama")
    config = copy.deepcopy(model.config)
    setattr(config, name, size)
    cache = RetainedCache(config)

    def read(n: int) -> Act:
        return lambda model: at_once(model, prompt(n), cache)

    words = f"= '{name} {size}': must be of a model with {name}"
    check_refused([(read(n), words) for n in (N, 1)], model)
    assert not any(layer.is_initialized for layer in cache.layers)  # type: ignore[union-attr]


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


def test_continuous_batching_is_refused_before_it_begins() -> None:
    words = "generate_batch = 'continuous batching': .*: type model.generate"
    acts: list[Act] = [lambda model: model.init_continuous_batching(), lambda model: model.generate_batch([[5, 6, 7]])]
    check_refused([(act, words) for act in acts], build("llama"))


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
    """Hub files of Gemma 2 and 3 have names that transformers treats like no choice: the cache is dynamic."""
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
    holder, at, target = (model.model.layers, "1", layer) if name == "1" else (layer, name, layer.self_attn)
    setattr(holder, at, copy.deepcopy(target))
    return lambda: setattr(holder, at, target)


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
    assert all(layer.keys is tensor for layer, tensor in zip(cache.full_layers, tensors, strict=True))


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


_DEEP: dict[str, Any] = {"vocab_size": 61, "n_layer": 2, "n_head": 4}


def flex() -> Any:
    model = tiny("Llama", **SMALL)
    model.config._attn_implementation_internal = "flex_attention"
    return model


wrapper = partial(
    prepared, "LlavaForConditionalGeneration", text_config={"model_type": "llama", **_GQA}, vision_config={
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    },
)
"""Model that accepts images."""


def with_slot_bias() -> PreTrainedModel:
    """Return a model without an ALiBi option whose attention adds a bias by the distance of slots."""
    model = prepare(tiny("CTRLLMHeadModel", **_DEEP, n_embd=64, dff=48), attention="eager")
    modeling: Any = modeling_ctrl
    original = modeling.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        distance = torch.arange(key.shape[2] - 1, -1, -1)
        return original(module, query, key, value, (0 if mask is None else mask) - 0.5 * distance, **options)

    modeling.eager_attention_forward = biased
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no attention of its own": (partial(tiny, "RoFormer", **_SIZES, is_decoder=True), "no eager_attention_forward"),
    "ALiBi that nothing tells of": (with_slot_bias, "depends on the distance between cache slots, as with ALiBi"),
    "ALiBi, BLOOM": (partial(tiny, "Bloom", **_DEEP, hidden_size=32), "ALiBi"),
    "ALiBi, Falcon": (partial(tiny, "Falcon", **SMALL, alibi=True), "ALiBi"),
    "recurrent, Mamba": (
        partial(tiny, "Mamba", vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4), "nothing to evict",
    ),
    "recurrent, RWKV": (partial(tiny, "Rwkv", vocab_size=61, hidden_size=32, num_hidden_layers=2), "recurrent"),
    "all layers slide, Mistral": (partial(tiny, "Mistral", **SMALL, sliding_window=16), "no full-attention layer"),
    "all layers slide, Phi-3": (partial(tiny, "Phi3", **SMALL, sliding_window=16), "no full-attention layer"),
    "layers that share a cache, in releases before kv_sharing_modes": (
        partial(tiny, "Llama", **SMALL, num_kv_shared_layers=1), "layers that share one cache",
    ),
    "windows beside linear layers, MiniMax": (
        partial(tiny, "MiniMax", **SMALL, sliding_window=16), "have a window too",
    ),
    "encoder and decoder": (
        partial(tiny, "T5ForConditionalGeneration", vocab_size=61, d_model=32, d_kv=8, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "attention that sees the future": (partial(tiny, "Llama", **SMALL, is_causal=False), "not causal"),
    "an encoder that hides nothing": (partial(tiny, "BertLMHeadModel", **SMALL), "not causal"),
    "another attention implementation": (flex, "attn_implementation is 'flex_attention'"),
    "no transformers model": (lambda: nn.Linear(2, 2), "must be a transformers PreTrainedModel"),
}

OTHER = "the attention must use the keys and values that the cache returns, but uses different tensors"
APART = "needs the same tokens in all layers and heads of the cache"
MASK = f"{APART}: the model makes a separate attention mask$"

differential = partial(prepared, "DiffLlama", **_GQA)
"""Model that rearranges values between cache and attention, and computes attention twice."""
dynamic_masks = partial(prepared, "Doge", **_GQA)
"""Model that computes a separate mask from the stored values."""
experts = partial(prepared, "JetMoe", **_GQA, kv_channels=12, num_local_experts=4, num_experts_per_tok=2)
"""Model that repeats keys and values for its experts. The query heads cycle through the KV heads."""
HANDED: dict[str, tuple[Callable[[], Any], Callable[[], RetentionPolicy], str]] = {
    "rearranged values, a set for each head": (differential, lambda: method("adakv"), f"{APART}: {OTHER}"),
    "rearranged values, decisions in steps": (differential, lambda: method("h2o"), APART),
    "a mask of its own, a set for each head": (dynamic_masks, lambda: method("snapkv"), MASK),
    "a mask of its own, a set for each layer": (dynamic_masks, lambda: method("chunkkv"), MASK),
    "repeated keys, a set for each head": (experts, lambda: method("adakv"), OTHER),
    "repeated keys, a set for each layer": (experts, lambda: method("chunkkv"), OTHER),
    # A later turn would show the keys of the cache, and pair them with other queries.
    "repeated keys, one set": (experts, METHODS["crystalcache"], OTHER),
}


@pytest.mark.parametrize("name", [*MODELS, *HANDED])
@pytest.mark.filterwarnings("ignore")  # Some of these configurations issue warnings.
def test_a_model_that_cannot_be_served_is_named_before_it_has_read_anything(
    name: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy: Callable[[], RetentionPolicy] = METHODS["crystalcache"]
    if name in HANDED:
        make, policy, words = HANDED[name]
    else:
        make, words = MODELS[name]
    monkeypatch.setattr(modeling_ctrl, "eager_attention_forward", modeling_ctrl.eager_attention_forward)
    model, calls = make(), list[int]()
    before = snapshot(model) if isinstance(model, PreTrainedModel) else {}
    hook = getattr(model, "base_model", model).register_forward_pre_hook(lambda *_: calls.append(1))
    with hook, pytest.raises(SpecError, match=words) as caught:
        policy()(model)
    assert (caught.value.argument, caught.value.value) == ("model", type(model).__name__)
    assert not calls
    if before:
        check_as_it_was(before, model)


@pytest.mark.parametrize(
    ("options", "full"),
    [({"use_sliding_window": False}, (0, 1, 2)), ({"use_sliding_window": True, "max_window_layers": 2}, (0, 1))],
)
def test_a_window_that_is_set_counts_only_where_it_is_used(options: dict[str, Any], full: tuple[int, ...]) -> None:
    model = prepared("Qwen2", **_GQA, sliding_window=WINDOW, **options)
    assert describe(model).full_layers == full
    check_continuation(model, METHODS["crystalcache"]())


@pytest.mark.law("as-it-is-described")
def test_a_wrapper_s_language_model_is_served() -> None:
    whole = wrapper()
    model: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
    with METHODS["crystalcache"]()(model) as run, torch.no_grad():
        with pytest.raises(SpecError, match=r"inputs_embeds = 'given': .* pass input_ids to the model"):
            whole(input_ids=prompt(40))
        model(input_ids=prompt(40))
    assert run.kept is not None
    assert len(run.kept) == 20


def test_policies_that_read_attention_read_text_alone() -> None:
    whole: Any = wrapper()
    zeros, images = torch.zeros(1, 40, dtype=torch.int64), torch.zeros(1, 3, 16, 16)
    with METHODS["crystalcache"]()(whole) as run, torch.no_grad():
        for one in (whole, whole.get_decoder()):
            with pytest.raises(SpecError, match="is already inside `with policy"), METHODS["crystalcache"]()(one):
                pass
        encodings: dict[str, Any] = {"image": {"pooler_output": torch.ones(1)}}
        images_given = {"pixel_values": images, "mm_token_type_ids": zeros + 1, "mm_encoder_outputs": encodings}
        for name, given in images_given.items():
            with pytest.raises(SpecError, match=f"{name} = 'given': image tokens can attend to later tokens"):
                whole.model(input_ids=prompt(40), **{name: given})
        for nothing in ({}, {"image": None, "video": None}):
            whole.model(input_ids=prompt(40), mm_encoder_outputs=nothing)
        whole.model(input_ids=prompt(40), token_type_ids=zeros)
    assert run.kept is not None
    assert len(run.kept) == 20


@pytest.mark.parametrize(("dtype", "options", "words"), [
    (torch.complex64, {}, r"dtype = torch.complex64: must be one of"),
    (torch.float32, {"position_bias": torch.zeros(2)}, "a position bias"),
])
def test_attention_beyond_q_and_k_is_refused(dtype: torch.dtype, options: dict[str, Tensor], words: str) -> None:
    tensor = torch.zeros(1, 2, 3, 4, dtype=dtype)
    seen = AttentionInputs(0, tensor, tensor, tensor, None, None, options)
    with pytest.raises(SpecError, match=words):
        Recorder(Needs("observed", None)).record(describe(build("llama")).attention[0], seen)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("make", [differential, dynamic_masks, experts])
def test_what_looks_at_nothing_that_is_rearranged_holds(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    if make is differential:
        for chosen in ("crystalcache", "streamingllm"):
            check_continuation(model, METHODS[chosen]())
    run, _ = read_prompt(model, StreamingLLM(20))
    assert run.kept is not None
    assert len(run.kept) == 20


@pytest.mark.law("parts-equal-the-whole")
def test_attention_that_runs_twice_has_asked_once() -> None:
    """Check that each query is recorded once, in one forward pass and in pieces."""
    model, at_once = differential(), {}
    for pieces in (1, 2):
        with METHODS["crystalcache"]()(model) as run, torch.no_grad():
            cache = None
            with run.prompt():
                for piece in torch.split(prompt(PROMPT), PROMPT // pieces, dim=1):
                    cache = model(input_ids=piece, past_key_values=cache, use_cache=True).past_key_values
        assert run.kept is not None
        at_once[pieces] = run.kept.tolist()
    assert at_once[1] == at_once[2]


def test_an_observation_of_other_values_is_refused() -> None:
    model = differential()
    with pytest.raises(SpecError, match=OTHER):
        observe(model, prompt(PROMPT))
    assert observe(model, prompt(PROMPT), needs=Needs("all", None)).columns == PROMPT
    with pytest.raises(SpecError, match=OTHER):
        observe(experts(), prompt(PROMPT), needs=Needs("observed", 1))


@pytest.mark.parametrize("read", ["session", "layer masks"])
def test_a_cache_whose_heads_differ_is_refused_wherever_it_is_read(read: str) -> None:
    """Check a cache that was created outside of any session."""
    model = differential()
    cache = observe(model, prompt(PROMPT), needs=Needs("all", None)).cache
    kept = torch.tensor([0, 1, 5]).repeat(6).numpy()
    kept[2] = 9
    cache.compact([Retention(kept, torch.arange(0, 19, 3).numpy(), PROMPT, Granularity.HEAD)])
    before = live_sets(cache)
    reader = StreamingLLM(20)(model) if read == "session" else layer_masks(model, cache)
    with torch.no_grad(), pytest.raises(SpecError, match=OTHER), reader:
        model(input_ids=prompt(1), past_key_values=cache)
    assert live_sets(cache) == before
    assert cache.get_seq_length() == PROMPT


def handing(change: Callable[[Tensor], Tensor], which: str) -> Callable[..., Any]:
    """Return Llama's attention with a different tensor in place of the keys or values that its cache returned."""
    original: Any = modeling_llama.LlamaAttention.forward

    def forward(module: nn.Module, *args: Any, **options: Any) -> Any:
        cache: Any = options.get(CACHE)

        class Between:
            def update(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
                keys, values = cache.update(*given, **more)
                return (change(keys), values) if which == "keys" else (keys, change(values))

        replaced: Any = {**options, CACHE: None if cache is None else Between()}
        return original(module, *args, **replaced)

    return forward


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("change", [torch.clone, torch.neg, lambda tensor: tensor.flip(0)])
def test_a_model_that_attends_to_changed_tensors_is_refused(
    change: Callable[[Tensor], Tensor], which: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", handing(change, which))
    with pytest.raises(SpecError, match=OTHER):
        method("adakv")(build("llama"))


@pytest.mark.parametrize("policy", ["adakv", "chunkkv"])
@pytest.mark.parametrize(
    ("mask", "words"), [(True, MASK), (False, f"{APART}: AttributeError, '.*' object has no attribute 'handed'$")]
)
def test_only_a_model_that_makes_masks_is_told_so(
    mask: bool, words: str, policy: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check two models that fail at a mask that is no tensor. Only one of them creates a mask."""
    original: Any = modeling_llama.LlamaAttention.forward

    def forward(module: nn.Module, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        if not isinstance(attention_mask, Tensor | None):
            attention_mask = attention_mask.handed
        elif mask and attention_mask is not None:
            attention_mask = attention_mask + 0
        replaced: Any = {**options, "attention_mask": attention_mask}
        return original(module, *args, **replaced)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(SpecError, match=words):
        method(policy)(build("llama"))


def test_one_that_changes_behind_the_door_is_refused_where_it_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method("adakv"))
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", handing(torch.neg, "values"))
    with observing(describe(model), cache), torch.no_grad(), pytest.raises(SpecError, match=OTHER):
        model(input_ids=prompt(1), past_key_values=cache)


@pytest.mark.law("the-model-stays-as-it-was")
def test_looking_leaves_no_trace() -> None:
    """Check that hooks, random numbers and the mode of the model are unchanged."""
    model = build("llama")
    model.config.attention_dropout = 0.5
    model.train(True)
    calls: list[nn.Module] = []
    seen, state = [], torch.get_rng_state()
    model.base_model.register_forward_hook(lambda module, *_: calls.append(module))
    first: Any = model.base_model.get_submodule("layers.0")
    first.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        method("adakv")(model)
    assert model.training
    assert not calls
    assert not seen
    assert len(first._forward_hooks) == 1
    assert torch.equal(torch.get_rng_state(), state)
    model.train(False)
    check_continuation(model, method("adakv"))


def failing(error: Exception) -> Callable[..., Any]:
    def update(*_: object, **__: object) -> None:
        raise error

    return update


@pytest.mark.law("as-it-is-described")
def test_a_model_that_was_refused_once_is_served_when_the_cause_is_gone() -> None:
    """Check that an error for lack of memory is not reported as an unsupported model."""
    model = build("llama")
    memory = torch.OutOfMemoryError("full")
    for error, caught in ((RuntimeError("not now"), SpecError), (memory, torch.OutOfMemoryError)):
        for part in (RaggedLayer, DenseLayer):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(caught, match=f"{error}"):
                patch.setattr(part, "update", failing(error))
                method("adakv")(model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SpecError, match=OTHER):
        patch.setattr(modeling_llama.LlamaAttention, "forward", handing(torch.neg, "values"))
        method("adakv")(model)
    check_continuation(model, method("adakv"))


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_heads_that_differ_are_served_under_autocast(family: str) -> None:
    """Check keys and values of different dtypes, which are combined as in a plain cache."""
    skip_without_attention(torch.bfloat16)
    model, token = build(family), prompt(1, seed=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = read_prompt(model, method("adakv"))
        kept = live_sets(cache)
        with observing(describe(model), cache):
            actual = at_once(model, token, cache)
        expected = Masked(model, prompt(PROMPT), kept).read(token)
    assert relative(actual.float(), expected.float()) < 5e-2
    check_continuation(model, method("adakv"))
