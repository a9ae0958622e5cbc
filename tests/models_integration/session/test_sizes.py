"""Budgets as memory: the number of tokens follows from what the full-attention layers of a model store."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kvspec
from models_integration.engines.keep import keep
from models_integration.policies.retention_policy import RetentionPolicy
from models_integration.policies.sizes import SizedPolicy, bytes_per_token, is_size, tokens_of_size
from reference.policies import knorm
from spec.budget import Budget
from spec.errors import SpecError
from tests.models_integration.session.families import build
from tests.models_integration.session.sessions import read_prompt

pytestmark = pytest.mark.law("as-it-is-described")


def stored_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for layer in cache.full_layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_per_token_are_those_of_the_full_attention_layers(family: str, dtype: torch.dtype) -> None:
    model: Any = build(family, dtype=dtype)
    _, cache = read_prompt(model, kvspec.FullCache(), 20)
    assert bytes_per_token(model) == stored_bytes(cache) // 20
    assert stored_bytes(cache) % 20 == 0


def test_layers_heads_width_and_dtype_count() -> None:
    model: Any = build("llama")
    config = model.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert bytes_per_token(model) == each
    assert tokens_of_size(f"{16 * each}B", model) == 16
    assert tokens_of_size(f"{16 * each - 1}B", model) == 15
    assert tokens_of_size("1MiB", model) == 2**20 // each
    assert tokens_of_size("0.5 MB", model) == 500_000 // each
    assert tokens_of_size(f" {each}B ", model) == 1


@pytest.mark.parametrize(("name", "constants"), [
    ("snapkv", {"W": 8}), ("adakv", {"W": 8}), ("tova", {}), ("streamingllm", {}), ("snapkv/layers=pyramid", {"W": 8}),
])
def test_a_prompt_keeps_what_the_memory_stores(name: str, constants: dict[str, Any]) -> None:
    model: Any = build("llama")
    each = bytes_per_token(model)
    run, cache = read_prompt(model, kvspec.policy_from_name(name, f"{20 * each + 5}B", **constants))
    plain, _ = read_prompt(model, kvspec.policy_from_name(name, 20, **constants))
    assert stored_bytes(cache) == 20 * each
    assert run.kept_tokens[0].budget == 20
    assert run.retentions[0].positions.tolist() == plain.retentions[0].positions.tolist()


def test_the_policy_of_a_memory_is_made_once() -> None:
    model, made = build("llama"), list[object]()

    def make(budget: Budget) -> RetentionPolicy:
        made.append(budget)
        return kvspec.policy_from_name("snapkv", budget, W=8)

    method = SizedPolicy(f"{20 * bytes_per_token(model)}B", make).on(model)
    assert (len(made), method.budget) == (1, Budget(count=20))


def test_a_stream_has_a_memory_and_the_full_cache_ignores_it() -> None:
    model: Any = build("llama")
    size = f"{400 * bytes_per_token(model)}B"
    stream = kvspec.policy_from_name("crystalcache", size, sentence_ends=frozenset({1}), stream=True)
    assert stream.on(model).budget == Budget(count=400)
    assert kvspec.policy_from_name("fullcache", size).on(model).budget == kvspec.FullCache().on(model).budget


@pytest.mark.law("refused-before-anything-changes")
def test_a_memory_below_the_floor_is_refused() -> None:
    model: Any = build("llama")
    each = bytes_per_token(model)
    policy = kvspec.policy_from_name("snapkv", f"{20 * each}B", W=32)
    words = rf"stores 20 tokens of {each} bytes, .* at least 32: give at least {32 * each}B"
    with pytest.raises(SpecError, match=words):
        policy(model)
    assert read_prompt(model, kvspec.policy_from_name("snapkv", f"{32 * each}B", W=32))[0].kept_tokens[0].most == 32
    with pytest.raises(SpecError, match="stores 0 tokens"):
        kvspec.policy_from_name("knorm", "1B")(model)


@pytest.mark.law("refused-before-anything-changes")
def test_a_memory_is_refused_where_only_the_first_layer_is_read(tmp_path: Path) -> None:
    """`keep` loads one layer, and the memory is that of all layers."""
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="budget = '64KiB': is the memory of all layers"):
        keep(tmp_path, kvspec.policy_from_name("streamingllm", "64KiB"), [5, 6, 7, 8])


@pytest.mark.law("refused-before-anything-changes")
def test_other_texts_and_wrong_names_are_refused_before_a_model_is_known() -> None:
    for text in ("64Mib", "64 M", "MiB", "-1MiB", "1e3B", ".5MiB", "64MiB/2"):
        assert not is_size(text)
        with pytest.raises(SpecError, match="budget"):
            kvspec.policy_from_name("snapkv", text)
    with pytest.raises(SpecError, match="snapkw"):
        kvspec.policy_from_name("snapkw", "64MiB")
    with pytest.raises(SpecError, match="is a memory, which needs the whole model: type a share such as"):
        kvspec.CustomPolicy(knorm(), "64MiB")
    with pytest.raises(SpecError, match="must be a number with a unit of memory"):
        tokens_of_size("64", build("llama"))
