"""Compaction gives memory back: no slot, no view and no reference of an evicted token is left."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from conformance.own.models_integration.session.families import (
    METHODS,
    WINDOW,
    Masked,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from models_integration import FullCache, RetainedCache, prefill
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import Plan, slots_of
from models_integration.cache.retained_cache import storage_bytes
from spec.errors import SpecError
from spec.retention import Retention

pytestmark = pytest.mark.law("freed-memory")

N, L, H_KV, D = 64, 3, 2, 12


def blocks(layers: list[RetainedLayer]) -> int:
    """Bytes of the memory blocks behind these layers, each once."""
    found: dict[int, int] = {}
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, Tensor)
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_cache_weighs_what_it_keeps(method: str, dtype: torch.dtype, width: int) -> None:
    prefilled = prefill(build("llama", dtype=dtype), METHODS[method](), prompt(N))
    assert prefilled.run.kept is not None
    R = len(prefilled.run.kept)
    assert blocks(prefilled.cache.full_layers) == 2 * L * H_KV * D * R * width
    assert storage_bytes(prefilled.cache.layers) == 2 * L * H_KV * D * R * width
    assert prefilled.run.bytes_freed == 2 * L * H_KV * D * (N - R) * width


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_only_full_layers_get_lighter(family: str) -> None:
    prefilled = prefill(build(family), METHODS["crystalcache"](), prompt(N))
    assert prefilled.run.kept is not None
    R = len(prefilled.run.kept)
    assert blocks(prefilled.cache.full_layers) == 2 * 2 * H_KV * D * R * 4
    assert prefilled.run.bytes_freed == 2 * 2 * H_KV * D * (N - R) * 4


@pytest.mark.parametrize("method", ["crystalcache", "streamingllm"])
def test_evicted_tensors_are_dead(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[weakref.ref[Tensor]] = []
    follow = DenseLayer.follow

    def watched(layer: DenseLayer, plan: Plan) -> None:
        assert layer.keys is not None
        assert layer.values is not None
        evicted.extend((weakref.ref(layer.keys), weakref.ref(layer.values)))
        follow(layer, plan)

    monkeypatch.setattr(DenseLayer, "follow", watched)
    model = build("llama")
    with METHODS[method]()(model) as run:
        greedy(model, prompt(N), 2)
        gc.collect()
        assert len(evicted) == 2 * L
        assert all(reference() is None for reference in evicted)
    assert run.cache is not None


def test_generation_pays_for_new_tokens_only() -> None:
    model = build("llama")
    with METHODS["crystalcache"]()(model) as run:
        greedy(model, prompt(N), 9)
    assert run.kept is not None
    assert run.cache is not None
    # The last of the nine has not been read.
    assert run.cache.stored_length == len(run.kept) + 8
    assert run.cache.get_seq_length() == N + 8
    assert run.cache.stored_positions().tolist() == [*run.kept.tolist(), *range(N, N + 8)]


def test_beams_share_what_is_kept() -> None:
    model = build("llama")
    with METHODS["crystalcache"]()(model) as run:
        greedy(model, prompt(N), 4, num_beams=3)
    assert run.kept is not None
    assert run.bytes_freed == 3 * 2 * L * H_KV * D * (N - len(run.kept)) * 4


@pytest.mark.law("a-cache-like-any-other")
def test_slots_come_from_positions() -> None:
    stored = torch.tensor([0, 3, 4, 9])
    assert slots_of(stored, torch.tensor([0, 4, 9])).tolist() == [0, 2, 3]
    for missing in ([1], [10], [3, 5]):
        with pytest.raises(SpecError, match="must be among the 4 stored positions"):
            slots_of(stored, torch.tensor(missing))


@pytest.mark.law("a-cache-like-any-other")
def test_a_cache_can_be_compacted_again() -> None:
    cache = prefill(build("llama"), FullCache(), prompt(N)).cache
    layer = cache.full_layers[0]
    assert layer.keys is not None
    keys = layer.keys.clone()
    layer.retain(torch.tensor([2, 5, 6, 40, 63]))
    layer.retain(torch.tensor([5, 40, 63]))
    assert torch.equal(layer.keys, keys[:, :, [5, 40, 63]])
    assert layer.stored_positions().tolist() == [[5, 40, 63]]
    assert layer.get_seq_length() == N
    with pytest.raises(SpecError, match="stored positions"):
        layer.retain(torch.tensor([6]))
    assert layer.stored_positions().tolist() == [[5, 40, 63]]


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("taken_back", [0, 1, 3, 4, 30])
def test_the_last_tokens_can_be_taken_back(taken_back: int) -> None:
    model, ids, following = build("llama"), prompt(N), prompt(3, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    kept = cache.stored_positions().tolist()
    at_once(model, following, cache)
    cache.crop(-taken_back)
    seen = N + 3 - taken_back
    assert cache.get_seq_length() == seen
    assert cache.stored_positions().tolist() == [p for p in [*kept, N, N + 1, N + 2] if p < seen]
    whole = torch.cat([ids, following], dim=1)
    again = prompt(4, seed=11)
    # Tokens of the prompt saw all of the prompt before them; those that followed saw what was kept.
    oracle = Masked(model, whole[:, : min(seen, N)], [p for p in kept if p < seen])
    if seen > N:
        oracle.read(whole[:, N:seen])
    assert relative(at_once(model, again, cache), oracle.read(again)) < 1e-5
    for bad in (1, -(seen + 5)):
        with pytest.raises(SpecError, match="tokens_to_remove"):
            cache.crop(bad)


@pytest.mark.law("a-cache-like-any-other")
def test_a_reset_cache_is_as_new() -> None:
    model = build("llama")
    cache = prefill(model, METHODS["crystalcache"](), prompt(N)).cache
    cache.reset()
    assert (cache.get_seq_length(), cache.stored_length) == (0, 0)
    with METHODS["crystalcache"]()(model) as run, torch.no_grad():
        model(input_ids=prompt(N), past_key_values=cache)
    assert run.cache is cache
    assert cache.get_seq_length() == N


@pytest.mark.law("a-cache-like-any-other")
def test_the_length_is_never_read_from_a_sliding_layer() -> None:
    model = build("gemma3")
    cache = prefill(model, METHODS["crystalcache"](), prompt(N)).cache
    cache.layers[0].cumulative_length = WINDOW  # type: ignore[union-attr]
    assert cache.get_seq_length() == cache.get_seq_length(0) == N


@pytest.mark.law("a-cache-like-any-other")
def test_the_caller_s_own_cache_is_the_one_that_is_compacted() -> None:
    model = build("gemma3")
    for cache in (DynamicCache(), DynamicCache(config=model.config), RetainedCache(model.config)):
        with METHODS["crystalcache"]()(model) as run, torch.no_grad():
            output = model(input_ids=prompt(N), past_key_values=cache)
        assert run.cache is cache
        assert output.past_key_values is cache
        assert isinstance(cache, RetainedCache)
        assert [type(layer).__name__ for layer in cache.layers] == [
            "DynamicSlidingWindowLayer", "DenseLayer", "DynamicSlidingWindowLayer", "DenseLayer"
        ]


@pytest.mark.law("refused-before-anything-changes")
def test_a_retention_about_something_else_is_refused() -> None:
    cache = prefill(build("llama"), FullCache(), prompt(N)).cache
    kept = torch.arange(4).numpy()
    with pytest.raises(SpecError, match="the cache has seen 64"):
        cache.compact([Retention.shared(kept, 10)])
    assert cache.stored_length == N
