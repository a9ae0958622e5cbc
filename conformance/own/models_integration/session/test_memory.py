"""Compaction frees memory, each layer right after that layer, and keeps what it would keep after the forward pass."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from conformance.own.models_integration.session.families import (
    _ALTERNATING,
    _GQA,
    METHODS,
    WINDOW,
    at_once,
    build,
    prepared,
    prompt,
    relative,
    states_of,
)
from conformance.own.models_integration.session.saved import same
from conformance.own.models_integration.session.sessions import method, published, sets
from models_integration import (
    CustomPolicy,
    FullCache,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
    prefill,
)
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.retained_cache import storage_bytes
from models_integration.cache.sliding_layer import GappedSlidingLayer
from models_integration.model.architecture import describe
from reference.policies import cake
from reference.policies.describe import describe_policy, list_policies
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
@pytest.mark.parametrize(("name", "dtype", "width"), [
    ("crystalcache", torch.bfloat16, 2), ("streamingllm", torch.float32, 4), ("fullcache", torch.float32, 4),
])
def test_a_cache_weighs_what_it_keeps(name: str, dtype: torch.dtype, width: int) -> None:
    prefilled = prefill(build("llama", dtype=dtype), METHODS[name](), prompt(N))
    assert prefilled.run.kept is not None
    R = len(prefilled.run.kept)
    assert blocks(prefilled.cache.full_layers) == 2 * L * H_KV * D * R * width
    assert storage_bytes(prefilled.cache.layers) == 2 * L * H_KV * D * R * width
    assert prefilled.run.bytes_freed == 2 * L * H_KV * D * (N - R) * width


def first_full() -> PreTrainedModel:
    """A full-attention layer stands before the sliding ones."""
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return prepared("Gemma3", **{**_GQA, **_ALTERNATING, "layer_types": types})


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
@pytest.mark.parametrize("name", ["crystalcache", "adakv"])
def test_a_reset_cache_is_as_new(name: str) -> None:
    model = build("llama")
    cache = prefill(model, method(name), prompt(N)).cache
    cache.reset()
    assert [type(layer) for layer in cache.layers] == [DenseLayer] * 3
    assert (cache.get_seq_length(), cache.stored_length, cache.layers_differ) == (0, 0, False)
    with method(name)(model) as run, torch.no_grad():
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


def read(model: PreTrainedModel, method: RetentionPolicy, ids: Tensor, *, streamed: bool) -> tuple[Session, Tensor]:
    """A prompt in one forward; inside `run.prompt()` it is decided and compacted when the forward is over."""
    cache = RetainedCache(model.config)
    with method(model) as run:
        if streamed:
            return run, at_once(model, ids, cache)
        with run.prompt():
            logits = at_once(model, ids, cache)
    return run, logits


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "crystalcache"), ("gemma3", "streamingllm"), ("llama", "snapkv")],
)
def test_one_layer_at_most_is_whole(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a layer's keys come, those of all earlier layers are compacted, and the whole ones are freed."""
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    update = DenseLayer.update

    def watched(layer: DenseLayer, *tensors: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        counts.append(sum(reference() is not None for reference in alive))
        keys, values = update(layer, *tensors, **others)
        alive.extend((weakref.ref(keys), weakref.ref(values)))
        return keys, values

    monkeypatch.setattr(DenseLayer, "update", watched)
    model = build(family)
    policy = METHODS[method]() if method in METHODS else published(method, model)
    policy(model)  # what a policy finds out once for each model is no forward of this prompt
    full = len(describe(model).full_layers)
    for streamed, expected in ((True, [0] * full), (False, [2 * done for done in range(full)])):
        alive.clear()
        counts.clear()
        read(model, policy, prompt(N), streamed=streamed)
        assert counts == expected
        assert sum(reference() is not None for reference in alive) == 0


BY_LAYER = tuple(one.name for one in list_policies() if one.layer_by_layer and one.layers == "all")


def of_two_prompts(family: str, name: str, *, streamed: bool) -> tuple[Session, Tensor]:
    """Two prompts under a policy, one of them padded where the policy takes padding, and three decode steps.

    Inside `run.prompt()` a prompt is decided and compacted when the forward is over.
    """
    model, ids = build(family), torch.cat([prompt(N), prompt(N, seed=4)])
    mask = torch.ones_like(ids)
    mask[1, : 9 * describe_policy(name).padded_batches] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    policy = METHODS[name]() if name in METHODS else published(name, model)
    with torch.no_grad(), policy(model) as run:
        if streamed:
            logits = [model(**given).logits]
        else:
            with run.prompt():
                logits = [model(**given).logits]
        for step in range(3):
            given = {"input_ids": prompt(2, seed=5 + step).T, "past_key_values": run.cache}
            logits.append(model(**given).logits)
    return run, torch.cat(logits, dim=1)


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize(("family", "name"), [
    *product(["llama"], [*METHODS, *BY_LAYER, "diverse-snapkv", "diverse-tova"]), *product(["gemma3"], METHODS),
])
def test_layers_that_are_decided_alone_keep_what_they_would_together(family: str, name: str) -> None:
    (first, logits), (second, other) = (of_two_prompts(family, name, streamed=streamed) for streamed in (True, False))
    assert torch.equal(logits, other)
    assert sets(first) == sets(second)
    assert first.cache is not None
    assert second.cache is not None
    same(first.cache, second.cache)
    assert (first.bytes_freed, first.over_budget) == (second.bytes_freed, second.over_budget)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that tensors on the CPU took during the run, beyond what they took before."""
    gc.collect()  # what other tests left would be freed during the run
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    used = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    return peak


@pytest.mark.parametrize(
    ("policy", "least"), [(StreamingLLM(0.125), 0.95 * 22 * 0.875), (CustomPolicy(cake(), 0.125), 24 * 0.875 - 1 - 2)],
)
def test_the_peak_of_a_deep_model_is_what_it_keeps_and_one_layer(policy: RetentionPolicy, least: float) -> None:
    """All tensors of the process are counted, and compared with those of a whole prompt, in layers.

    Of CAKE's cascade two more layers are copies for a moment.
    """
    model = prepared("Llama", **{**_GQA, "num_hidden_layers": 24, "num_key_value_heads": 4})

    def run(block: Callable[[Session], AbstractContextManager[None]]) -> None:
        with torch.no_grad(), policy(model) as session, block(session):
            model.base_model(input_ids=prompt(512))

    deferred, streamed = (peak_bytes(partial(run, block)) for block in (Session.prompt, lambda session: nullcontext()))
    assert deferred - streamed > least * 2 * 4 * 12 * 512 * 4
    assert streamed < deferred / 3
