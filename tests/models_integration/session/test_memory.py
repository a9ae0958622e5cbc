"""Compaction frees the memory of each layer right after the attention of the layer.

CAKE's cascade keeps the tokens that the reference keeps for the whole prompt. The cache never exceeds the budget plus
one layer.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from conformance.strategies.numbers import seeds
from models_integration import (
    CrystalCache,
    CustomPolicy,
    FullCache,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
    prefill,
)
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.fixed_size_layers import GappedSlidingLayer
from models_integration.cache.retained_cache import storage_bytes
from models_integration.model.architecture import describe
from models_integration.session.cascade import Cascade, can_cascade
from models_integration.session.method import join_layers, method_of
from reference.policies import cake, diverse, in_blocks, pyramidkv, retain
from reference.policies.layers import is_cascading
from spec.budget import Budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import LayerView, Observation, Policy
from spec.retention import Granularity
from tests.models_integration.session.families import (
    _ALTERNATING,
    _GQA,
    ENDS,
    METHODS,
    WINDOW,
    at_once,
    build,
    prepared,
    prompt,
    relative,
    states_of,
)
from tests.models_integration.session.sessions import method

pytestmark = pytest.mark.law("freed-memory")


N = 64
L, H_KV, D = 3, 2, 12


def blocks(layers: list[RetainedLayer]) -> int:
    """Return the bytes of all memory blocks of these layers. Each block is counted once."""
    actual: dict[int, int] = {}
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, Tensor)
            actual[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(actual.values())


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
    """Return a model in which a full-attention layer precedes the sliding layers."""
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return prepared("Gemma3", **{**_GQA, **_ALTERNATING, "layer_types": types})


def held(cache: RetainedCache) -> list[tuple[int, Tensor]]:
    return [(layer.get_seq_length(), layer.keys.clone()) for layer in cache.layers]  # type: ignore[union-attr]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("recorded", [None, 2])
def test_a_crop_that_a_window_has_passed_changes_no_layer(recorded: int | None) -> None:
    """Check a crop to a position whose window needs freed tokens. Only tokens recorded since then are available."""
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
    """Check a crop before the window is full, and a crop while past tokens are recorded."""
    model, again = first_full(), prompt(4, seed=11)
    cache, expected = (prefill(model, FullCache(), prompt(n)).cache for _ in range(2))
    if recording:
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
    at_once(model, prompt(2, seed=9), cache)
    cache.crop(-2)
    assert relative(at_once(model, again, cache), at_once(model, again, expected)) < 1e-5


@pytest.mark.law("a-cache-like-any-other")
def test_a_window_with_gaps_gives_back_what_it_has_read() -> None:
    """Check that the window and the crop count positions."""
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
    cache = prefill(build("llama"), FullCache(), torch.cat([prompt(N), prompt(N, seed=4)])).cache
    before = held(cache)
    for change in (cache.reorder_cache, cache.batch_select_indices):
        with pytest.raises(SpecError, match=r"must name rows of the cache, in \[0, 2\)"):
            change(torch.tensor(rows))
    with pytest.raises(SpecError, match="repeats = 0: must be at least 1"):
        cache.batch_repeat_interleave(0)
    assert all(torch.equal(keys, now) for (_, keys), (_, now) in zip(before, held(cache), strict=True))


@pytest.mark.law("a-cache-like-any-other")
def test_a_mask_of_rows_chooses_their_records_too() -> None:
    cache = prefill(build("llama"), METHODS["crystalcache"](), torch.cat([prompt(N), prompt(N, seed=4)])).cache
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


def streamed(session: Session) -> AbstractContextManager[None]:
    """Return an empty context. Without `session.prompt()`, each layer is compacted during the forward pass."""
    return nullcontext()


def observing(layer: int) -> RetentionPolicy:
    return CrystalCache(0.5, ENDS, replace(TINY, observed_layer=layer), backend="numpy")


@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize(("family", "make", "whole"), [
    *(("llama", partial(observing, layer), [0, 2, 4][: layer + 1] + [0] * (2 - layer)) for layer in range(3)),
    ("gemma3", METHODS["streamingllm"], [0, 0]), ("llama", partial(method, "snapkv"), [0, 0, 0]),
])
def test_one_layer_at_most_is_whole(
    family: str, make: Callable[[], RetentionPolicy], whole: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that earlier layers are compacted and their full tensors freed before a layer's keys are stored.

    Layers up to the observed layer of CrystalCache wait for its decision.
    """
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    update = DenseLayer.update

    def watched(layer: DenseLayer, *tensors: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        counts.append(sum(reference() is not None for reference in alive))
        keys, values = update(layer, *tensors, **others)
        alive.extend((weakref.ref(keys), weakref.ref(values)))
        return keys, values

    monkeypatch.setattr(DenseLayer, "update", watched)
    model, policy = build(family), make()
    policy(model)  # The policy runs forward passes once for each model. Run them before the prompt.
    full = len(describe(model).full_layers)
    for block, expected in ((streamed, whole), (Session.prompt, [2 * done for done in range(full)])):
        alive.clear()
        counts.clear()
        with policy(model) as run, block(run):
            at_once(model, prompt(N), RetainedCache(model.config))
        assert counts == expected
        assert sum(reference() is not None for reference in alive) == 0


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak memory of tensors on the CPU during the run, minus the memory before the run."""
    gc.collect()  # Objects of earlier tests would be freed during the run.
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
    """Compare the memory of all tensors of the process with that of a whole prompt, in layers.

    CAKE's cascade briefly holds copies of two more layers.
    """
    model = prepared("Llama", **{**_GQA, "num_hidden_layers": 24, "num_key_value_heads": 4})

    def run(block: Callable[[Session], AbstractContextManager[None]]) -> None:
        with torch.no_grad(), policy(model) as session, block(session):
            model.base_model(input_ids=prompt(512))

    whole, streaming = (peak_bytes(partial(run, block)) for block in (Session.prompt, streamed))
    assert whole - streaming > least * 2 * 4 * 12 * 512 * 4
    assert streaming < whole / 3


WEIGHTS = (0.0, 5e-324, 1e-300, 0.5, 1.0, 1.0, 2.0, 3.0, 1e3, 1e6, 1e300)
"""Preferences: zero, equal values, and values at both ends of the range of float64."""


def given_scores(view: LayerView, *constants: object) -> tuple[Any, Any]:
    """Return scores from the keys, and a preference from the scaling."""
    return view.k[:, :, 0], np.array([[view.scaling]])


def policy_of(W: int) -> Policy:
    """Return CAKE with the scores of `given_scores`."""
    policy: Any = cake(W)
    return Policy(**vars(policy) | {"scorer": replace(policy.scorer, layer=given_scores)})


@dataclass
class Rows:
    """Observations of a session for one layer of a batch."""

    observations: list[Observation]
    columns: int
    copies: int

    @property
    def prompts(self) -> Sequence[int]:
        return range(0, self.copies * len(self.observations), self.copies)

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        return self.observations[row // self.copies]


def check_cascade(
    sizes: Sequence[int], preferences: Sequence[Sequence[float]], W: int, B: int, H: int, copies: int, seed: int,
) -> None:
    """Check prompts of these sizes. Each layer has a preference for each prompt."""
    rng, columns, L, rows = np.random.default_rng(seed), max(sizes), len(preferences), copies * len(sizes)
    policy, budget = policy_of(W), Budget(count=B)
    scores = [[rng.integers(-2, 3, (H, n, 1)).astype(float) for n in sizes] for _ in preferences]
    views = [
        [LayerView(None, own, None, weight, None) for own, weight in zip(layer, weights, strict=True)]
        for layer, weights in zip(scores, preferences, strict=True)
    ]
    cache = RetainedCache(LlamaConfig(num_hidden_layers=L))
    method = method_of(policy, budget)
    cascade, tokens = Cascade(method, cache, copies), torch.rand(L, 2, rows, H, columns, 3)
    slots = L * (max(min(n, max(B, W)) for n in sizes) + 2)
    for index, layer in enumerate(views):
        cache.update(tokens[index, 0], tokens[index, 1], index)
        shown = [Observation(n, H, None, {index: view}) for n, view in zip(sizes, layer, strict=True)]
        assert cascade.take(index, policy, Rows(shown, columns, copies))  # type: ignore[arg-type]
        held_slots = min(slots, (index + 1) * columns)
        assert storage_bytes(cache.full_layers) == 2 * rows * H * held_slots * 3 * 4
    padding = torch.tensor([columns - n for n in sizes]).repeat_interleave(copies)
    actual = join_layers(method, cascade.read(padding if padding.any() else None)).retentions
    freed = 2 * rows * H * L * columns * 3 * 4 - storage_bytes(cache.full_layers)
    assert cache.bytes_freed == freed
    for row, n in enumerate(sizes):
        whole = Observation(n, L * H, None, {index: layer[row] for index, layer in enumerate(views)})
        expected = retain(policy, budget, whole)
        assert np.array_equal(actual[row].offsets, expected.offsets)
        assert np.array_equal(actual[row].positions, expected.positions)
        for group in range(L * H):
            (index, head), kept = divmod(group, H), torch.tensor(expected.group(group))
            for at in range(row * copies, (row + 1) * copies):
                stored = cache.full_layers[index]
                assert torch.equal(stored.head_positions(at, head), kept)
                held = torch.cat(stored.held(at, slice(head, head + 1)))
                assert torch.equal(held, tokens[index, :, at, head, kept + columns - n])


weights = st.one_of(st.sampled_from(WEIGHTS), st.floats(0, 1e6))


@pytest.mark.spec("PO-PREFERENCE-BUDGET")
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=2), W=st.integers(1, 4), B=st.integers(1, 13),
    preferences=st.lists(st.tuples(weights, weights), min_size=1, max_size=6), H=st.integers(1, 2),
    copies=st.integers(1, 2), seed=seeds,
)
def test_a_cascade_keeps_what_the_reference_keeps(
    sizes: list[int], preferences: list[tuple[float, float]], W: int, B: int, H: int, copies: int, seed: int,
) -> None:
    """Check one or two prompts in up to six layers. The bytes of the slots are counted after each layer."""
    check_cascade(sizes, [own[: len(sizes)] for own in preferences], W, B, H, copies, seed)


@pytest.mark.law("as-it-is-described")
def test_other_selectors_and_several_devices_do_not_cascade() -> None:
    here, there = torch.nn.Linear(1, 1, device="cpu"), torch.nn.Linear(1, 1, device="meta")
    one, two = (SimpleNamespace(decoder=torch.nn.ModuleList(parts)) for parts in ([here], [here, there]))
    assert can_cascade(cake(), one)  # type: ignore[arg-type]
    assert not can_cascade(cake(), two)  # type: ignore[arg-type]
    assert not any(map(is_cascading, (in_blocks(cake(), 4), diverse(cake()), pyramidkv())))


@pytest.mark.law("a-cache-like-any-other")
def test_gradients_are_those_of_a_whole_prompt() -> None:
    """Compare gradients through the keys and values of the pool, down to the weights of the first layer."""
    model, policy, actual = build("llama", dtype=torch.float64), CustomPolicy(cake(W=4), 0.3), []
    for block in (Session.prompt, streamed):
        model.zero_grad()
        with policy(model) as session:
            with block(session):
                model(input_ids=prompt(64))
            model(input_ids=prompt(1), past_key_values=session.cache).logits.square().mean().backward()
        weights = model.base_model.get_submodule("layers.0.self_attn").parameters()
        actual.append([own.grad.clone() for own in weights if own.grad is not None])
    assert len(actual[0]) >= 4
    for own, other in zip(*actual, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def check_cascades() -> None:
    """Check cascades of fixed prompts."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(6, 13, 2).tolist()
        preferences = rng.choice(WEIGHTS[: 3 + seed % 9], (4, 2)).tolist()
        check_cascade(sizes, preferences, 1 + seed % 3, int(rng.integers(4, 9)), 2, 1, seed)
