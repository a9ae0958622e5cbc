"""Compaction frees memory: no slot, view or reference is left."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from conformance.own.models_integration.session.families import (
    _ALTERNATING,
    _GQA,
    METHODS,
    WINDOW,
    at_once,
    build,
    greedy,
    prepare,
    prompt,
    relative,
    states_of,
)
from models_integration import FullCache, RetainedCache, prefill
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import Plan
from models_integration.cache.retained_cache import storage_bytes
from models_integration.cache.sliding_layer import GappedSlidingLayer
from spec.errors import SpecError

pytestmark = pytest.mark.law("freed-memory")


N = 64
L = 3
H_KV = 2
D = 12


def blocks(layers: list[RetainedLayer]) -> int:
    """Bytes of the memory blocks behind these layers, each once."""
    found: dict[int, int] = {}
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, Tensor)
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize(("method", "dtype", "width"), [
    ("crystalcache", torch.bfloat16, 2), ("streamingllm", torch.float32, 4), ("fullcache", torch.float32, 4),
])
def test_a_cache_weighs_what_it_keeps(method: str, dtype: torch.dtype, width: int) -> None:
    prefilled = prefill(build("llama", dtype=dtype), METHODS[method](), prompt(N))
    assert prefilled.run.kept is not None
    R = len(prefilled.run.kept)
    assert blocks(prefilled.cache.full_layers) == 2 * L * H_KV * D * R * width
    assert storage_bytes(prefilled.cache.layers) == 2 * L * H_KV * D * R * width
    assert prefilled.run.bytes_freed == 2 * L * H_KV * D * (N - R) * width


def test_evicted_tensors_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[weakref.ref[Tensor]] = []
    follow = DenseLayer.follow

    def watched(layer: DenseLayer, plan: Plan) -> None:
        assert layer.keys is not None
        assert layer.values is not None
        evicted.extend((weakref.ref(layer.keys), weakref.ref(layer.values)))
        follow(layer, plan)

    monkeypatch.setattr(DenseLayer, "follow", watched)
    model = build("llama")
    with METHODS["crystalcache"]()(model) as run:
        greedy(model, prompt(N), 2)
        gc.collect()
        assert len(evicted) == 2 * L
        assert all(reference() is None for reference in evicted)
    assert run.cache is not None


def test_beams_share_what_is_kept() -> None:
    model = build("llama")
    with METHODS["crystalcache"]()(model) as run:
        greedy(model, prompt(N), 4, num_beams=3)
    assert run.kept is not None
    assert run.bytes_freed == 3 * 2 * L * H_KV * D * (N - len(run.kept)) * 4


def first_full() -> PreTrainedModel:
    """A full-attention layer stands before the sliding ones."""
    torch.manual_seed(0)
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return prepare(Gemma3ForCausalLM(Gemma3TextConfig(**{**_GQA, **_ALTERNATING, "layer_types": types})))


def held(cache: RetainedCache) -> list[tuple[int, Tensor]]:
    return [(layer.get_seq_length(), layer.keys.clone()) for layer in cache.layers]  # type: ignore[union-attr]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("recorded", [None, 2])
def test_a_crop_that_a_window_has_passed_changes_no_layer(recorded: int | None) -> None:
    """What the earlier window would show is freed, but for what has been recorded since."""
    model = first_full()
    cache, expected = (prefill(model, METHODS["crystalcache"](), prompt(N)).cache for _ in range(2))
    if recorded is not None:
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
        for one in (cache, expected):
            at_once(model, prompt(recorded, seed=4), one)
    before = held(cache)
    with pytest.raises(SpecError, match="tokens_to_remove = -3: sliding-window layers have freed the tokens before"):
        cache.crop(-3)
    cache.crop(0)
    for (seen, keys), (after, now) in zip(before, held(cache), strict=True):
        assert after == seen
        assert torch.equal(now, keys[:, :, -now.shape[2] :])
    again = prompt(2, seed=9)
    assert relative(at_once(model, again, cache), at_once(model, again, expected)) < 1e-5


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize(("n", "recording"), [(WINDOW - 3, False), (N, True)])
def test_tokens_are_taken_back_beside_windows(n: int, recording: bool) -> None:
    """Before a window is full, or while the past is recorded."""
    model, again = first_full(), prompt(4, seed=11)
    cache, expected = (prefill(model, FullCache(), prompt(n)).cache for _ in range(2))
    if recording:
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
    at_once(model, prompt(2, seed=9), cache)
    cache.crop(-2)
    assert relative(at_once(model, again, cache), at_once(model, again, expected)) < 1e-5


@pytest.mark.law("a-cache-like-any-other")
def test_a_window_with_gaps_gives_back_what_it_has_read() -> None:
    """Its window counts positions, and so does what is taken back."""
    cache, read = RetainedCache(build("llama").config), torch.randn(1, 2, 11, 4)
    layer = GappedSlidingLayer.after(DynamicSlidingWindowLayer(8), 5)
    cache.layers = [DenseLayer(), layer]
    cache.update(read, read, 0)
    cache.update(read[:, :, 5:], read[:, :, 5:], 1)
    cache.crop(-4)
    assert (layer.positions.tolist(), layer.get_seq_length()) == ([5, 6], 7)
    assert layer.keys is not None
    assert torch.equal(layer.keys, read[:, :, 5:7])
    for index in (0, 1):
        cache.update(read[:, :, :6], read[:, :, :6], index)
    assert layer.positions.tolist() == list(range(6, 13))
    with pytest.raises(SpecError, match="freed the tokens before position 6"):
        cache.crop(-1)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("rows", [[0, 2], [0.5], [[0]], [False, False], []])
def test_rows_that_are_not_there_change_no_layer(rows: Any) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with FullCache()(model):
        at_once(model, torch.cat([prompt(N), prompt(N, seed=4)]), cache)
    before = held(cache)
    for change in (cache.reorder_cache, cache.batch_select_indices):
        with pytest.raises(SpecError, match=r"must name rows of the cache, in \[0, 2\)"):
            change(torch.tensor(rows))
    with pytest.raises(SpecError, match="repeats = 0: must be at least 1"):
        cache.batch_repeat_interleave(0)
    assert all(torch.equal(keys, now) for (_, keys), (_, now) in zip(before, held(cache), strict=True))


@pytest.mark.law("a-cache-like-any-other")
def test_a_mask_of_rows_chooses_their_records_too() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model):
        at_once(model, torch.cat([prompt(N), prompt(N, seed=4)]), cache)
    second = states_of(cache).rows[1]
    cache.batch_select_indices(torch.tensor([False, True]))
    assert states_of(cache).rows == (second,)


@pytest.mark.law("unusable-after-a-failure")
def test_a_choice_of_rows_that_fails_half_way_leaves_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = prefill(build("llama"), FullCache(), prompt(N)).cache
    monkeypatch.setattr(cache.layers[1], "reorder_cache", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.reorder_cache(torch.tensor([0, 0]))
    with pytest.raises(SpecError, match="a choice of rows failed half way"):
        cache.get_seq_length()


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
