"""Models unlike Llama: recurrent states, latents, indexers, shared caches, and positions without RoPE.

The oracle is a full cache with masks. The oracle runs the same model, so it has the same faults as the model. Therefore
turns and padded rows are also compared with one forward pass over all tokens.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma3nTextConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conformance.cache_suite.oracle import Masked
from models_integration import CustomPolicy, RetainedCache, RetentionPolicy, decide, load_cache, save_cache
from models_integration.model.architecture import describe
from models_integration.session.verbs import compact, observe, read
from reference.policies import snapkv
from reference.policies.protections import protecting
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import LayerView, Needs
from tests.models_integration.session.families import METHODS, SMALL, at_once, greedy, prepared, prompt, relative
from tests.models_integration.session.masked import head_sets
from tests.models_integration.session.sessions import Looking, live_sets, method, method_of, read_prompt

pytestmark = [pytest.mark.law("eviction-equals-masking"), pytest.mark.filterwarnings("ignore")]

N, BOUND = 40, 1e-5

_SIZES = {**SMALL, "num_hidden_layers": 4}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}

# Class of transformers and configuration, by name.
Models = dict[str, tuple[str, dict[str, Any]]]
MODELS: Models = {
    "qwen3_next": ("Qwen3NextForCausalLM", {
        **_SIZES, **_LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2,
    }),
    "lfm2": ("Lfm2ForCausalLM", {**_SIZES, "layer_types": ["conv", "full_attention"] * 2}),
    "bamba": ("BambaForCausalLM", {**_SIZES, **_MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_SIZES, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "minimax": ("MiniMaxForCausalLM", {**_SIZES, "num_local_experts": 2, "block_size": 16}),
}
# If a turn has several tokens, this model ignores the state of its recurrent layers.
JAMBA: Models = {"jamba": ("JambaForCausalLM", {
    **_SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
})}
_LATENT: dict[str, Any] = {
    **_SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}
LATENT: Models = {"deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT)}
# The indexer has many heads, so that no two keys have the same score.
INDEXED: Models = {"deepseek_v32": ("DeepseekV32ForCausalLM", {
    **_LATENT, "num_hidden_layers": 2, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8,
})}
# The last two layers read the caches of earlier layers: of the second full-attention layer and of the last sliding
# layer.
_SHARED: dict[str, Any] = {
    **_SIZES, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "head_dim": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131, "sliding_window": 16,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3 + ["full_attention"],
}
SHARED: Models = {
    "gemma3n": ("Gemma3nForCausalLM", _SHARED), "gemma4": ("Gemma4ForCausalLM", {**_SHARED, "global_head_dim": 8}),
}
IMAGE, IMAGE_AT = 7, slice(10, 14)
_SEEN: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}
_HALF: dict[str, Any] = {
    **_SIZES, "num_hidden_layers": 2, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
# Image tokens of Gemma 3 attend to each other in both directions. Image tokens of LLaVA attend to earlier tokens.
IMAGES: Models = {
    "gemma3": ("Gemma3ForConditionalGeneration", {
        "text_config": _HALF, "vision_config": _SEEN, "mm_tokens_per_image": 4, "image_token_index": IMAGE,
    }),
    "llava": ("LlavaForConditionalGeneration", {
        "vision_config": {"model_type": "clip_vision_model", **_SEEN},
        "text_config": {"model_type": "llama", **_SIZES, "num_hidden_layers": 2}, "image_token_index": IMAGE,
    }),
}
_AXES = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
WRAPPERS: Models = {**IMAGES, "qwen2_vl": ("Qwen2VLForConditionalGeneration", {
    "text_config": _AXES, "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
    "image_token_id": IMAGE, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10,
})}
_PLAIN: dict[str, Any] = {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4}
OTHER_POSITIONS: Models = {
    "ctrl": ("CTRLLMHeadModel", {**_PLAIN, "dff": 48}),
    "gptj": ("GPTJForCausalLM", {**_PLAIN, "rotary_dim": 8}),
    "bert": ("BertLMHeadModel", {**_SIZES, "is_decoder": True}),
    "roberta": ("RobertaForCausalLM", {**_SIZES, "pad_token_id": 1, "is_decoder": True}),
    "bart": ("BartForCausalLM", {
        "vocab_size": 131, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48, "is_decoder": True, "is_encoder_decoder": False,
    }),
}
# Whisper's model passes position ids on to its decoder without naming the argument.
WHISPER: Models = {"whisper": ("WhisperForCausalLM", {
    **_SIZES, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1,
    "max_target_positions": 64,
})}
# The softmax of the attention has a sink for each head.
SINKS: Models = {"gpt_oss": ("GptOssForCausalLM", {**_HALF, "num_local_experts": 2, "num_experts_per_tok": 1})}
LOSES_ITS_STATE = "the recurrent layers lose the state if a later forward pass has several tokens"


@cache
def build(name: str) -> PreTrainedModel:
    """Return a tiny model. No test changes the model."""
    if name in SHARED and not hasattr(Gemma3nTextConfig, "kv_sharing_modes"):
        pytest.skip("layers that share a cache are supported in later releases of transformers")
    every = {**MODELS, **JAMBA, **LATENT, **INDEXED, **SHARED, **WRAPPERS, **OTHER_POSITIONS, **WHISPER, **SINKS}
    family, sizes = every[name]
    return prepared(family, **sizes)


def in_one_forward(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def check_conversation(
    model: PreTrainedModel, policy: str, pieces: Sequence[int] = (N, 1, 1, 9, 1), **options: int,
) -> tuple[Masked, RetainedCache]:
    """Compare a prompt, steps, a turn and a step with the masked model, and return the model and the cache."""
    masked, cache = Masked(model), RetainedCache(model.config)
    with method(policy)(model) as run:
        for number, tokens in enumerate(pieces):
            ids = prompt(tokens, seed=number)
            actual: Any = at_once(model, ids, cache, **options)
            assert relative(actual, masked.read(ids)[:, -actual.shape[1] :]) < BOUND
            if tokens > 1:
                masked.keep(list(live_sets(cache).values()))
    assert run.bytes_freed > 0
    return masked, cache


def refused(name: str, policy: str) -> str | None:
    """Return the error for a policy that a model does not support, or None."""
    if policy == "adakv" and name in (*LATENT, *INDEXED):
        return r"one latent for all heads \(MLA\): use a policy that keeps the same tokens"
    if policy != "streamingllm" and name in INDEXED:
        return "an indexer of the model selects the tokens for attention: use streamingllm"
    return None


def conversations() -> list[Any]:
    """Return all pairs. A daily run has streamingllm, one more policy, and all unsupported policies of each model."""
    result, others = [], ("crystalcache", "chunkkv", "adakv")
    for at, name in enumerate([*MODELS, *LATENT, *INDEXED, "gemma3n", *OTHER_POSITIONS, *SINKS]):
        for policy in ("streamingllm", *others):
            by_day = policy in ("streamingllm", others[at % 3]) or refused(name, policy) is not None
            result.append(pytest.param(name, policy, marks=() if by_day else pytest.mark.nightly))
    return result


@pytest.mark.parametrize(("name", "policy"), conversations())
def test_a_conversation_equals_the_masked_model(name: str, policy: str) -> None:
    reason = refused(name, policy)
    with pytest.raises(SpecError, match=reason) if reason else nullcontext():
        check_conversation(build(name), policy)


def test_a_crop_takes_the_indexer_s_keys_back() -> None:
    model = build("deepseek_v32")
    cache = RetainedCache(model.config)
    with METHODS["streamingllm"]()(model):
        at_once(model, prompt(N), cache)
        expected = at_once(model, prompt(1, seed=2), cache)
        cache.crop(-1)
        assert relative(at_once(model, prompt(1, seed=2), cache), expected) < BOUND


def with_an_image(name: str) -> dict[str, Tensor]:
    """Return a prompt with an image and its four tokens."""
    ids = prompt(N)
    ids[ids == IMAGE] = IMAGE + 1
    ids[:, IMAGE_AT] = IMAGE
    image = {"pixel_values": torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))}
    return {"input_ids": ids, **image, **({"token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else {})}


def check_image(name: str, policy: RetentionPolicy) -> Any:
    """Check that the tokens of an image are evicted like tokens of text. Later turns are text.

    Returns:
        The kept sets.
    """
    model, given = build(name), dict[str, Any](with_an_image(name))
    masked, cache = Masked(model), RetainedCache(model.config)
    with policy(model) as run:
        actual = at_once(model, given["input_ids"], cache, **{key: given[key] for key in given if key != "input_ids"})
        assert relative(actual, masked.read(given.pop("input_ids"), **given)) < BOUND
        masked.keep(list(live_sets(cache).values()))
        for ids in (prompt(1, seed=1), prompt(9, seed=2)):
            ids[ids == IMAGE] = IMAGE + 1
            assert relative(at_once(model, ids, cache), masked.read(ids)) < BOUND
            kept = live_sets(cache)
            masked.keep(list(kept.values()))
        with pytest.raises(SpecError, match="can be passed only with the first prompt"):
            at_once(model, prompt(5), cache, pixel_values=given["pixel_values"])
    assert run.bytes_freed > 0
    return kept


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("policy", ["streamingllm", "keydiff"])
def test_an_image_is_evicted(name: str, policy: str) -> None:
    check_image(name, method(policy))


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_is_pinned_stays(name: str) -> None:
    positions = range(IMAGE_AT.start, IMAGE_AT.stop)
    pinned = protecting(METHODS["streamingllm"]().on(build(name)).policy, positions)
    for sets in check_image(name, CustomPolicy(pinned, 0.4)).values():
        assert all(set(positions) <= set(kept) for kept in sets)


@pytest.mark.parametrize(("name", "policy"), [
    ("qwen2_vl", "snapkv"), ("qwen2_vl", "keydiff"), ("llava", "streamingllm"), ("gemma3", "keydiff"),
    ("gemma3", "snapkv"),
])
def test_text_is_generated_in_two_turns(name: str, policy: str) -> None:
    """Check wrappers with text alone. transformers 5.24 passes an empty dict of encodings."""
    model, ids = build(name), prompt(N)
    masked = Masked(model)
    full, heads = describe(model).full_layers, SMALL["num_key_value_heads"]
    with method(policy)(model) as run:
        for number in range(2):
            ids = torch.where(ids < 11, ids + 20, ids)  # without ids of an image
            new = greedy(model, ids, 4, past_key_values=run.cache)
            assert torch.equal(masked.read(ids[:, masked.seen :])[:, -1].argmax(dim=-1), new[:, 0])
            masked.keep(list(head_sets(run.retentions[0], full, heads).values()))
            assert torch.equal(masked.read(new[:, :-1]).argmax(dim=-1), new[:, 1:])
            ids = torch.cat([ids, new, prompt(6, seed=number)], dim=1)
    assert run.bytes_freed > 0


@pytest.mark.parametrize("policy", ["streamingllm", "pyramidkv", "adakv"])
def test_layers_that_share_a_cache_read_the_last_queries_alone(policy: str) -> None:
    """Check few requested logits: Gemma 4 then passes only the last queries to these layers."""
    check_conversation(build("gemma4"), policy, (N, 9, 1), logits_to_keep=3)


@pytest.mark.law("decided-as-the-reference")
def test_in_a_turn_each_kept_set_is_scored_with_the_sinks_of_its_own_heads() -> None:
    model, policy, noted = build("gpt_oss"), snapkv(W=4), list[Any]()

    def score(view: LayerView) -> Any:
        noted.append(np.asarray(view.sinks).tolist())
        return policy.scorer.score(view)  # type: ignore[attr-defined]

    scorer = replace(policy.scorer, score=score)  # type: ignore[type-var]
    with CustomPolicy(replace(policy, scorer=scorer), parse_budget(0.5))(model):
        cache = RetainedCache(model.config)
        for tokens in (N, 7):
            at_once(model, prompt(tokens), cache)
    assert noted == [[-1.0, 0.0, 1.0, 2.0], [-1.0, 0.0], [1.0, 2.0]]


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("name", LATENT)
def test_a_policy_reads_the_keys_that_the_model_makes_of_latents(name: str) -> None:
    """Check a prompt and a turn. The cache stores latents, and the policy reads the keys of each query head."""
    model, looking, handed = build(name), Looking(Needs("all", None, values=True)), list[Any]()
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def shown(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        handed.append((key[0], value[0]))
        return stock(module, query, key, value, *args, **options)

    with pytest.MonkeyPatch.context() as patch, method_of(looking)(model):
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", shown)
        cache = RetainedCache(model.config)
        for tokens in (N, 7):
            handed.clear()
            at_once(model, prompt(tokens), cache)
            for view, (key, value) in zip(looking.shown[-1].layers.values(), handed, strict=True):
                assert torch.equal(torch.as_tensor(view.k), key)
                assert torch.equal(torch.as_tensor(view.v), value)


@pytest.mark.parametrize("name", MODELS)
def test_turns_go_on_from_the_state(name: str) -> None:
    """Check that pieces equal one forward pass over all tokens. No token is evicted."""
    model, ids = build(name), prompt(N)
    cache = RetainedCache(model.config)
    with METHODS["fullcache"]()(model):
        pieces = [at_once(model, part, cache) for part in torch.split(ids, [20, 9, 1, 10], dim=1)]
    assert relative(torch.cat(pieces, dim=1), in_one_forward(model, ids)) < BOUND


@pytest.mark.parametrize(("name", "policy"), [
    *((name, "streamingllm") for name in [*MODELS, *INDEXED]), ("gpt_oss", "keydiff"),
])
def test_padded_rows_equal_their_single_runs(name: str, policy: str) -> None:
    model, texts, rows = build(name), [prompt(N)[:, :31], prompt(N, seed=4)], []
    ids = torch.cat([torch.nn.functional.pad(texts[0], (N - 31, 0)), texts[1]])
    mask = torch.tensor([[0] * (N - 31) + [1] * 31, [1] * N])
    later = [prompt(1, seed=5).expand(2, -1), prompt(6, seed=6).expand(2, -1)]
    cache = RetainedCache(model.config)
    with method(policy)(model):
        at_once(model, ids, cache, attention_mask=mask)
        actual = torch.cat([at_once(model, part, cache) for part in later], dim=1)
    for text in texts:
        single = RetainedCache(model.config)
        with method(policy)(model):
            at_once(model, text, single)
            rows.append(torch.cat([at_once(model, part[:1], single) for part in later], dim=1))
    assert relative(actual, torch.cat(rows)) < BOUND


@pytest.mark.parametrize(("name", "policy"), [
    *product(MODELS, ["snapkv", "adakv"]), *product(LATENT, ["chunkkv"]), *product(INDEXED, ["streamingllm"]),
])
def test_a_saved_cache_goes_on_bit_for_bit(name: str, policy: str, tmp_path: Any) -> None:
    model = build(name)
    with method(policy)(model) as run:
        at_once(model, prompt(N), RetainedCache(model.config))
        assert run.cache is not None
        save_cache(run.cache, model, tmp_path / "cache")
        loaded = load_cache(tmp_path / "cache", model)
        assert (loaded.nbytes, loaded.state_bytes) == (run.cache.nbytes, run.cache.state_bytes)
        for ids in (prompt(1), prompt(5)):
            assert torch.equal(at_once(model, ids, run.cache), at_once(model, ids, loaded))


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", MODELS)
def test_states_are_counted_and_not_freed(name: str) -> None:
    model = build(name)
    full = observe(model, prompt(N)).cache
    run, cache = read_prompt(model, METHODS["streamingllm"](), N)
    assert cache.state_bytes == full.state_bytes > 0
    assert run.bytes_freed == full.nbytes - cache.nbytes


def test_the_caches_of_two_decisions_do_not_share_states() -> None:
    model = build("qwen3_next")
    observed = observe(model, prompt(N))
    decision = decide(METHODS["streamingllm"]().on(model), observed)
    first, second = compact(observed.cache, decision), compact(observed.cache, decision)
    expected, actual = (read(model, cache, prompt(3)).logits for cache in (first, second))
    assert expected is not None
    assert actual is not None
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", [*MODELS, *INDEXED])
def test_beams_choose_states_too(name: str) -> None:
    """Check that beams of a full cache equal those of the model without a policy."""
    model = build(name)
    expected = greedy(model, prompt(N), 6, num_beams=3)
    with METHODS["fullcache"]()(model):
        assert torch.equal(greedy(model, prompt(N), 6, num_beams=3), expected)


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_that_loses_its_state_takes_steps_and_no_turns() -> None:
    model = build("jamba")
    masked, cache = check_conversation(model, "streamingllm", (N, 1, 1))
    with METHODS["streamingllm"]()(model):
        with pytest.raises(SpecError, match=LOSES_ITS_STATE):
            at_once(model, prompt(5), cache)
        ids = prompt(1, seed=9)
        assert relative(at_once(model, ids, cache), masked.read(ids)) < BOUND


@pytest.mark.law("refused-before-anything-changes")
def test_rows_of_different_lengths_need_position_ids() -> None:
    model, mask = build("bart"), torch.ones(1, N, dtype=torch.int64)
    mask[0, :3] = 0
    with METHODS["streamingllm"]()(model), pytest.raises(SpecError, match="the decoder also numbers padding positions"):
        at_once(model, prompt(N), RetainedCache(model.config), attention_mask=mask)


def test_a_padded_row_is_observed_at_its_positions() -> None:
    model = build("whisper")
    row, padding = prompt(N), torch.zeros(1, 5, dtype=torch.int64)
    rows = torch.cat([torch.cat([padding, row[:, : N - 5]], dim=1), row])
    mask = torch.ones_like(rows)
    mask[0, :5] = 0
    alone, both = observe(model, row[:, : N - 5]), observe(model, rows, attention_mask=mask)
    assert alone.logits is not None
    assert both.logits is not None
    assert relative(both.logits[:1], alone.logits) < BOUND


def test_a_state_gives_no_token_back() -> None:
    model = build("qwen3_next")
    cache = RetainedCache(model.config)
    with METHODS["streamingllm"]()(model):
        at_once(model, prompt(N), cache)
        with pytest.raises(SpecError, match="recurrent layers cannot remove a token"):
            cache.crop(-1)
    assert cache.get_seq_length() == N
