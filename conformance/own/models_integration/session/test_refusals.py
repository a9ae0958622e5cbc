"""What is not served is refused by name, before anything changes."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    QuantizedCache,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from conformance.own.models_integration.session.families import (
    _GQA,
    METHODS,
    VOCABULARY,
    WINDOW,
    at_once,
    build,
    greedy,
    prepare,
    prompt,
)
from conformance.own.models_integration.session.foreign_models import REFUSED
from conformance.own.models_integration.session.oracle_checks import check_decoding
from conformance.own.models_integration.session.ragged_checks import method
from conformance.own.models_integration.session.snapshots import same_weights, snapshot
from models_integration import RetainedCache, prefill
from models_integration.model.architecture import describe
from spec.errors import SpecError

pytestmark = pytest.mark.law("refused-before-anything-changes")

N = 40


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")  # some of these configurations warn of their own
def test_a_model_that_cannot_be_served_is_named(name: str) -> None:
    make, words = REFUSED[name]
    model: Any = make()
    with pytest.raises(SpecError, match=words) as caught:
        METHODS["crystalcache"]()(model)
    assert caught.value.argument == "model"
    assert caught.value.value == type(model).__name__


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ({"use_sliding_window": False, "sliding_window": WINDOW}, (0, 1, 2)),
        ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}, (0, 1)),
    ],
)
def test_a_window_that_is_set_counts_only_where_it_is_used(options: dict[str, Any], full: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = prepare(Qwen2ForCausalLM(Qwen2Config(**_GQA, **options)))
    assert describe(model).full_layers == full
    check_decoding(model, METHODS["crystalcache"]())


def refused(words: str, run: Callable[[PreTrainedModel], object], model: PreTrainedModel | None = None) -> None:
    """The call is refused inside a context; model and context go on as if it had not been made."""
    model = model or build("llama")
    before = snapshot(model)
    tokens = prefill(model, METHODS["crystalcache"](), prompt(N)).run.kept
    with METHODS["crystalcache"]()(model) as session:
        with pytest.raises(SpecError, match=words):
            run(model)
        assert session.kept is None
        assert session.cache is None
        greedy(model, prompt(N), 2)
        assert session.kept is not None
        assert tokens is not None
        assert session.kept.tolist() == tokens.tolist()
    after = snapshot(model)
    assert same_weights(before, model)
    assert {key: before[key] for key in before if key != "weights"} == {
        key: after[key] for key in after if key != "weights"
    }


FORWARDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "one token": ("one query is a decode step, not a segment", lambda: {"input_ids": prompt(1)}),
    "no tokens": ("must not be empty", lambda: {"input_ids": torch.empty(1, 0, dtype=torch.int64)}),
    "an id past the vocabulary": (
        rf"input_ids = {VOCABULARY}: must lie in \[0, {VOCABULARY}\)",
        lambda: {"input_ids": torch.cat([prompt(5), torch.tensor([[VOCABULARY]])], dim=1)},
    ),
    "a negative id": ("input_ids = -1: must lie", lambda: {"input_ids": torch.tensor([[5, -1, 7]])}),
    "ids that are not integers": ("must be an integer tensor", lambda: {"input_ids": prompt(N).float()}),
    "ids without rows": ("must be an integer tensor", lambda: {"input_ids": prompt(N)[0]}),
    "embeddings": ("inputs_embeds = 'given'", lambda: {"inputs_embeds": torch.randn(1, N, 48)}),
    "no cache": ("use_cache = False: must be on", lambda: {"input_ids": prompt(N), "use_cache": False}),
    "padding on the right": (
        "attention_mask = 'zeros': must be left of all ones: pad on the left, right padding and holes are not served",
        lambda: {"input_ids": prompt(N), "attention_mask": (torch.arange(N) < N - 3).long()[None]},
    ),
    "a hole in the mask": (
        "right padding and holes are not served",
        lambda: {"input_ids": prompt(N), "attention_mask": (torch.arange(N) != 3).long()[None]},
    ),
    "a hole in one row's mask": (
        "right padding and holes are not served",
        lambda: {
            "input_ids": prompt(2 * N).view(2, N),
            "attention_mask": torch.stack([torch.ones(N), torch.arange(N) != 7]).long(),
        },
    ),
    "a mask that is no mask": (
        "attention_mask = .*: must hold zeros and ones only",
        lambda: {"input_ids": prompt(N), "attention_mask": torch.arange(N)[None]},
    ),
    "a row of padding": (
        "input_ids = '0 tokens': one query is a decode step",
        lambda: {
            "input_ids": prompt(2 * N).view(2, N), "attention_mask": torch.tensor([[1], [0]]).expand(2, N),
        },
    ),
    "a padded row of one token": (
        "input_ids = '1 tokens': one query is a decode step",
        lambda: {"input_ids": prompt(N), "attention_mask": (torch.arange(N) == N - 1).long()[None]},
    ),
    "positions that count the padding": (
        "position_ids",
        lambda: {
            "input_ids": prompt(N), "attention_mask": (torch.arange(N) > 3).long()[None],
            "position_ids": torch.arange(N)[None],
        },
    ),
    "a 4D mask": (
        "must have a column for each token of the prompt",
        lambda: {"input_ids": prompt(N), "attention_mask": torch.ones(1, 1, N, N, dtype=torch.bool)},
    ),
    "masks per layer type": (
        "attention_mask = 'dict'", lambda: {"input_ids": prompt(N), "attention_mask": {"full_attention": None}},
    ),
    "positions that do not start at 0": (
        "position_ids", lambda: {"input_ids": prompt(N), "position_ids": torch.arange(2, N + 2)[None]},
    ),
    "positions of three axes": (
        "position_ids", lambda: {"input_ids": prompt(N), "position_ids": torch.arange(N)[None, None].expand(3, 1, N)},
    ),
    "tensors as a cache": (
        "past_key_values = 'tuple'", lambda: {"input_ids": prompt(N), "past_key_values": ((), ())},
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_prompt_that_cannot_be_served_is_named(name: str) -> None:
    words, arguments = FORWARDS[name]
    refused(words, lambda model: model(**arguments()))


@pytest.mark.law("as-it-is-described")
def test_arguments_may_come_by_position() -> None:
    model = build("llama")
    expected = prefill(model, METHODS["crystalcache"](), prompt(N)).run.kept
    assert expected is not None
    with METHODS["crystalcache"]()(model) as run:
        model.base_model(prompt(N))
        assert run.kept is not None
        assert run.kept.tolist() == expected.tolist()
        with pytest.raises(SpecError, match="right padding"):
            model.base_model(prompt(N), (torch.arange(N) < 3).long()[None])


def other_cache(kind: str, model: PreTrainedModel) -> DynamicCache:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=64)  # type: ignore[return-value]
    if kind == "quantised":
        # Its libraries are not installed here; the class is what counts.
        return object.__new__(QuantizedCache)  # type: ignore[return-value]
    if kind == "foreign":
        return type("ForeignCache", (DynamicCache,), {})()  # type: ignore[no-any-return]
    cache = DynamicCache(offloading=False)
    if kind == "offloaded":
        cache.offloading = True
    else:
        at_once(model, prompt(5), cache)
    return cache


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("static", "past_key_values = 'StaticCache': must be a DynamicCache"),
        ("quantised", "past_key_values = 'QuantizedCache'"),
        ("foreign", "past_key_values = 'ForeignCache'"),
        ("offloaded", "an offloaded cache cannot be compacted"),
        ("filled", "past_key_values = '5 tokens': must be empty before a prompt"),
    ],
)
def test_a_cache_that_cannot_be_compacted_is_named(kind: str, words: str) -> None:
    model = build("llama")
    cache = other_cache(kind, model)
    kept_type = type(cache)
    refused(words, lambda model: at_once(model, prompt(N), cache), model)
    assert type(cache) is kept_type


@pytest.mark.parametrize("token", [1, 3])
def test_a_filled_cache_is_refused_for_steps_too(token: int) -> None:
    model = build("llama")
    cache = other_cache("filled", model)
    refused("must be empty before a prompt", lambda model: at_once(model, prompt(token), cache), model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_chunk_size": 16, "token_healing": True}, "token_healing = True: changes the prompt's length"),
        ({"cache_implementation": "static"}, "cache_implementation = 'static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation = 'offloaded'"),
        ({"cache_implementation": "quantized"}, "cache_implementation = 'quantized'"),
        ({"use_cache": False}, "use_cache = False"),
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding"), ({"use_mtp": True}, "assisted decoding"),
    ],
)
@pytest.mark.parametrize("where", ["argument", "own config"])
def test_ways_to_generate_that_are_not_served_are_named(options: dict[str, Any], words: str, where: str) -> None:
    model = build("llama")
    if where == "own config":
        options = {"generation_config": GenerationConfig(**options)}  # type: ignore[no-untyped-call]
    refused(words, lambda model: greedy(model, prompt(N), 2, **options), model)


def test_embeddings_are_refused_by_generate_too() -> None:
    refused("inputs_embeds = 'Tensor'", lambda model: greedy(model, prompt(N), 2, inputs_embeds=torch.zeros(1, N, 48)))


def test_a_model_s_own_generation_settings_count() -> None:
    model = build("llama")
    assert model.generation_config is not None
    model.generation_config.prompt_lookup_num_tokens = 3
    with METHODS["crystalcache"]()(model), pytest.raises(SpecError, match="assisted decoding"):
        greedy(model, prompt(N), 2)


@pytest.mark.parametrize("name", ["crystalcache", "snapkv", "chunkkv"])
@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_an_attention_that_is_switched_to_inside_is_named(name: str, implementation: str) -> None:
    """And the cache is as it was: a step follows under the model's own."""
    model: Any = build("llama")
    with (METHODS[name]() if name in METHODS else method(name))(model):
        cache = RetainedCache(model.config)
        at_once(model, prompt(N), cache)
        for text in (prompt(1), prompt(5)):
            model.config._attn_implementation_internal = implementation
            with pytest.raises(SpecError, match=f"attn_implementation = '{implementation}': must be sdpa or eager"):
                at_once(model, text, cache)
            model.set_attn_implementation("sdpa")
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


@pytest.mark.parametrize("name", ["crystalcache", "snapkv", "chunkkv"])
@pytest.mark.parametrize("what", ["attention", "layer"])
def test_a_module_that_is_replaced_inside_is_named(name: str, what: str) -> None:
    model: Any = build("llama")
    with (METHODS[name]() if name in METHODS else method(name))(model):
        cache = RetainedCache(model.config)
        at_once(model, prompt(N), cache)
        layer = model.model.layers[1]
        own = layer if what == "layer" else layer.self_attn
        other = copy.deepcopy(own)
        holder, at = (model.model.layers, "1") if what == "layer" else (layer, "self_attn")
        setattr(holder, at, other)
        for text in (prompt(1), prompt(5)):
            with pytest.raises(SpecError, match=f"its '{at}', a {type(own).__name__}, was replaced"):
                at_once(model, text, cache)
        setattr(holder, at, own)
        at_once(model, prompt(1), cache)
        assert cache.get_seq_length() == N + 1


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


def test_contexts_do_not_nest() -> None:
    model = build("llama")
    method = METHODS["crystalcache"]()
    with method(model) as run:
        with pytest.raises(SpecError, match="contexts do not nest"), METHODS["streamingllm"]()(model):
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


def test_a_model_whose_decoder_is_in_a_context_is_busy() -> None:
    model = build("llama")
    with METHODS["crystalcache"]()(model), pytest.raises(SpecError, match="do not nest"):
        METHODS["crystalcache"]()(cast(PreTrainedModel, model.base_model)).__enter__()


def test_a_dtype_without_a_meaning_is_refused() -> None:
    from models_integration.attention.capture import Attended, Recorder
    from spec.policy import Needs

    attention = describe(build("llama")).attention[0]
    tensor = torch.zeros(1, 2, 3, 4, dtype=torch.complex64)
    with pytest.raises(SpecError, match=r"dtype = torch.complex64: must be one of"):
        Recorder(Needs("observed", None)).record(attention, Attended(tensor, tensor, tensor, None, None, {}))


@pytest.mark.parametrize(("name", "words"), [("s_aux", "attention sinks"), ("position_bias", "a position bias")])
def test_attention_beyond_q_and_k_is_refused(name: str, words: str) -> None:
    from models_integration.attention.capture import Attended, Recorder
    from spec.policy import Needs

    attention = describe(build("llama")).attention[0]
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(SpecError, match=words):
        Recorder(Needs("observed", None)).record(
            attention, Attended(tensor, tensor, tensor, None, None, {name: torch.zeros(2)})
        )
