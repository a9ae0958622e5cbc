"""Kept sets per layer and KV head, and the memory that is freed right after the attention of each layer.

Decode steps over such heads in one call need a GPU kernel. The tests compute each of its sequences separately, by the
contract in the kernel's documentation. The runs of a head are merged into the result for the whole head.
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
    NamedPolicy,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
    prefill,
)
from models_integration.attention import cached_attention
from models_integration.attention.cached_attention import RUN, attended_in_runs
from models_integration.attention.capture import observing
from models_integration.cache.continuation import Decision
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.fixed_size_layers import GappedSlidingLayer
from models_integration.cache.ragged_layer import HeadLayout, RaggedLayer
from models_integration.cache.retained_cache import storage_bytes
from models_integration.model.architecture import describe
from models_integration.policies.methods import policy_from_name
from models_integration.session.cascade import Cascade, can_cascade
from models_integration.session.method import join_layers
from models_integration.session.method import method_of as session_method
from models_integration.session.verbs import compact, observe, read, side_by_side
from reference.policies import cake, chunkkv, diverse, in_blocks, pyramidkv, retain, snapkv
from reference.policies.describe import describe_policy
from reference.policies.layers import is_cascading
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import LayerView, Needs, Observation, Policy
from spec.retention import Granularity, Retention
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
    step_by_step,
)
from tests.models_integration.session.masked import HeadSets, Masked
from tests.models_integration.session.sessions import (
    NEW,
    PROMPT,
    TOLERANCE,
    Looking,
    live_sets,
    method,
    method_of,
    outputs_of,
    published,
    read_prompt,
    skip_without_attention,
    small,
)

pytestmark = pytest.mark.law("eviction-equals-masking")


def stored_in_steps(model: PreTrainedModel, name: str) -> list[HeadSets]:
    """Return the stored positions after the prompt and after each step, under a policy that evicts in steps."""
    with method(name)(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        stored = [live_sets(run.cache)]
        for token in torch.split(prompt(NEW, seed=9), 1, dim=1):
            model(input_ids=token, past_key_values=run.cache)
            stored.append(live_sets(run.cache))
    one_set = describe_policy(name).granularity == "layer"
    assert one_set or any(len(set(map(tuple, sets))) > 1 for sets in stored[-1].values())
    return stored


@pytest.mark.spec("PO-TOVA")
def test_tova_drops_the_least_attended_key_of_the_last_query() -> None:
    model = build("llama", attention="eager")
    stored = stored_in_steps(model, "tova")
    oracle, following = Masked(model, prompt(PROMPT), stored[0]), prompt(NEW, seed=9)
    for step, token in enumerate(torch.split(following, 1, dim=1)):
        weights = _weights(oracle, token)
        for layer, sets in stored[step + 1].items():
            live = [*stored[step][layer][0], PROMPT + step]
            order = sorted(live, key=lambda at: (-float(weights[layer][:, at].double().mean()), at))
            assert sorted(order[: len(sets[0])]) == list(sets[0])
        oracle.keep(list(stored[step + 1].values()))


@pytest.mark.spec("PO-H2O")
def test_h2o_drops_the_smallest_sum() -> None:
    model = build("llama", attention="eager")
    stored = stored_in_steps(model, "h2o")
    with torch.no_grad():
        first = model(input_ids=prompt(PROMPT), output_attentions=True).attentions
    sums = [[_grouped(weights[0].double().sum(dim=1), head) for head in range(2)] for weights in first]
    oracle, following = Masked(model, prompt(PROMPT), stored[0]), prompt(NEW, seed=9)
    for step, token in enumerate(torch.split(following, 1, dim=1)):
        weights = _weights(oracle, token)
        for layer, sets in stored[step + 1].items():
            for head, kept in enumerate(sets):
                new = _grouped(weights[layer].double(), head)
                sums[layer][head] = torch.cat([sums[layer][head], torch.zeros(1, dtype=torch.float64)]) + new
                live = [*stored[step][layer][head], PROMPT + step]
                newest = live[len(live) - len(kept) // 2 :]
                others = sorted(set(live) - set(newest), key=lambda at: -float(sums[layer][head][at]))
                assert sorted([*newest, *others[: len(kept) - len(newest)]]) == list(kept)
        oracle.keep(list(stored[step + 1].values()))


def _weights(oracle: Masked, token: Tensor) -> list[Tensor]:
    """Return the attention weights (H, seen) of one query in each layer, as the eager model reports them."""
    with outputs_of(one for one in oracle.model.modules() if type(one).__name__.endswith("Attention")) as seen:
        oracle.read(token)
    return [output[1][0, :, 0] for output in seen]


def _grouped(heads: Tensor, head: int) -> Tensor:
    return heads[2 * head : 2 * head + 2].sum(dim=0)


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", ["adakv", "snapkv", "pyramidkv"])
def test_a_quarter_of_the_bytes(name: str) -> None:
    model, n = build("llama"), 512
    run, cache = read_prompt(model, method(name, 0.25), n)
    full = 2 * 3 * 2 * n * 12 * 4
    assert abs(storage_bytes(cache.layers) / full - 0.25) <= 0.02 * 0.25
    assert run.bytes_freed == full - storage_bytes(cache.layers)
    assert cache.mean_length == 128
    with observing(describe(model), cache):
        step_by_step(model, prompt(64, seed=9), cache)
    grown = 2 * 3 * 2 * (128 + 64) * 12 * 4
    assert grown <= storage_bytes(cache.layers) <= 1.02 * grown
    for layer in cache.full_layers:
        if isinstance(layer, RaggedLayer):
            assert layer.layout.spare <= 3


@pytest.mark.law("a-cache-like-any-other")
def test_inference_mode_can_end_between_prompt_and_steps() -> None:
    model, following = build("llama"), prompt(NEW, seed=9)
    with method("adakv")(model) as run:
        with torch.inference_mode():
            model(input_ids=prompt(PROMPT))
        kept = live_sets(run.cache)
        actual = step_by_step(model, following, run.cache)
    assert relative(actual, Masked(model, prompt(PROMPT), kept).read(following)) < TOLERANCE


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("name", "each", "groups"), [("snapkv", "layer and KV head", 6), ("chunkkv", "layer", 3)])
def test_sets_of_layers_and_heads_are_not_one_set(name: str, each: str, groups: int) -> None:
    """Check that `kept` raises an error that names the groups, and that `repr` contains the mean of their sizes."""
    model = build("llama")
    run, cache = read_prompt(model, method(name))
    (retention,) = run.retentions
    for holder in (run, retention):
        with pytest.raises(SpecError, match=rf"kept = '{groups} kept sets': each {each} has its own"):
            _ = holder.kept
    sets = [positions for sets in live_sets(cache).values() for positions in sets]
    assert [retention.group(i).tolist() for i in range(groups)] == sets[:: len(sets) // groups]
    assert (run.seen, run.stored) == (PROMPT, cache.mean_length)
    numbers = f"seen={PROMPT}, stored={cache.mean_length:g}, bytes_freed={run.bytes_freed}"
    assert repr(run) == f"Session('{name}', budget=0.3, kept='{run.kept_tokens[0]}', {numbers})"


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("name", ["adakv", "h2o", "streamingllm"])
def test_freed_bytes_add_up_over_turns_and_steps(name: str) -> None:
    model = build("llama")
    policy = StreamingLLM(0.3) if name == "streamingllm" else method(name)
    with policy(model) as run:
        assert repr(run).endswith("seen=0, stored=0, bytes_freed=0)")
        cache, before = RetainedCache(model.config), 0
        for n, seed in ((PROMPT, 3), (1, 4), (1, 5), (12, 6), (1, 7)):
            at_once(model, prompt(n, seed=seed), cache)
            assert run.bytes_freed >= before
            before = run.bytes_freed
    tokens = PROMPT + 1 + 1 + 12 + 1
    stored = sum(len(kept) for sets in live_sets(cache).values() for kept in sets)
    assert run.bytes_freed == (tokens * 6 - stored) * 2 * 12 * 4
    assert run.cache is cache
    assert cache.nbytes == storage_bytes(cache.layers) >= stored * 2 * 12 * 4


@pytest.mark.spec("PO-BLOCKS")
@pytest.mark.parametrize("name", ["streamingllm", "keydiff", "adakv", "h2o"])
def test_whole_blocks_after_every_turn(name: str) -> None:
    """Check that each head keeps all or no tokens of each block of four, in steps too."""
    model, seen, before = build("llama"), 0, list[set[int]]([set()] * 6)
    with policy_from_name(name, 0.3, block=4, **small(name))(model):
        cache = RetainedCache(model.config)
        for n, seed in ((PROMPT, 3), (1, 11), (12, 12), (1, 13), (5, 14), (1, 15)):
            at_once(model, prompt(n, seed=seed), cache)
            seen, stored = seen + n, [set(kept) for heads in live_sets(cache).values() for kept in heads]
            for kept, earlier in zip(stored, before, strict=True):
                assert kept == {at for first in {i // 4 * 4 for i in kept} for at in range(first, min(first + 4, seen))}
                assert {*range(seen // 4 * 4, seen)} <= kept <= earlier | {*range(seen - n, seen)}
            before = stored
    assert min(map(len, before)) < seen


@pytest.mark.spec("PO-TURN")
def test_a_turn_is_decided_over_each_head_s_own_keys() -> None:
    """Check Knorm after a turn: each head keeps the stored tokens with the smallest keys of the model."""
    model = build("llama")
    with published("knorm", model)(model):
        at_once(model, prompt(PROMPT), cache := RetainedCache(model.config))
        before = live_sets(cache)
        at_once(model, prompt(12, seed=12), cache)
    oracle = Masked(model, prompt(PROMPT), before)
    oracle.read(prompt(12, seed=12))
    B = parse_budget(0.3).tokens(PROMPT + 12)
    for layer, heads in live_sets(cache).items():
        norms = list(oracle.cache)[layer][0][0].norm(dim=-1)
        for head, kept in enumerate(heads):
            stored = torch.tensor([*before[layer][head], *range(PROMPT, PROMPT + 12)])
            assert list(kept) == stored[norms[head, stored].argsort()[:B]].sort().values.tolist()


FIRST_ALONE = r"evicts from the first prompt only: .* `with run\.reading"
CHANGED: list[tuple[str, Callable[[], RetentionPolicy], str]] = [
    ("adakv", lambda: StreamingLLM(20), "needs the same tokens in all layers and heads"),
    ("adakv", lambda: method("chunkkv"), "needs the same tokens in all heads"),
    ("adakv", lambda: NamedPolicy("defensivekv", 0.3, W=8), "compares the tokens of different layers or heads"),
    ("snapkv", lambda: CustomPolicy(diverse(snapkv(W=8)), parse_budget(0.3)), "tokens of different layers or heads"),
    ("chunkkv", lambda: CustomPolicy(chunkkv(W=8, N_reuse=2), 0.3), "compares the tokens of different layers or heads"),
    ("tova", lambda: method("h2o"), "h2o needs a cache that h2o has made"),
    ("adakv", lambda: method("h2o"), "h2o needs a cache that h2o has made"),
    ("streamingllm", METHODS["crystalcache"], "under a different policy"),
    ("kvzip", lambda: method("kvzip"), FIRST_ALONE),
    ("streamingllm", lambda: method_of(Looking(Needs("observed", None, token_ids=True))), FIRST_ALONE),
]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize(("before", "after", "words"), CHANGED)
def test_a_turn_that_cannot_be_decided_is_named(before: str, after: Callable[[], Any], words: str) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method(before))
    kept = live_sets(cache)
    with after()(model), torch.no_grad(), pytest.raises(SpecError, match=words):
        model(input_ids=prompt(8), past_key_values=cache)
    assert live_sets(cache) == kept
    assert cache.get_seq_length() == PROMPT


D, G = 8, 2
LENGTHS = [(1,), (RUN,), (RUN + 1, 3), (5, 3 * RUN, 2 * RUN - 1, 1)]


def sequences(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_ends: Tensor, most_queries: int,
    most_keys: int, *, scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return output (T, 1, d) and log-sum-exp (1, T) of T queries.

    Sequence i attends to the keys of sequence i only.
    """
    assert query_ends[0] == key_ends[0] == 0
    assert len(query_ends) == len(key_ends)
    assert query_ends[-1] == len(query)
    assert key_ends[-1] == len(keys)
    outputs, sums = [], []
    for at in range(len(query_ends) - 1):
        q, k, v = (
            tensor[ends[at] : ends[at + 1], 0]
            for tensor, ends in ((query, query_ends), (keys, key_ends), (values, key_ends))
        )
        if len(q):
            assert len(q) <= most_queries
            assert 0 < len(k) <= most_keys
            logits = q @ k.T * (D**-0.5 if scale is None else scale)
            outputs.append(logits.softmax(dim=1) @ v)
            sums.append(logits.logsumexp(dim=1))
    return torch.cat(outputs)[:, None], torch.cat(sums)[None]


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_runs_are_merged_to_the_attention_of_the_whole_head(
    lengths: tuple[int, ...], rows: int, spare: int, scale: float | None,
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths) + spare)
    kept = tuple(torch.arange(length - 1) for _ in range(rows) for length in lengths)
    layout = HeadLayout(kept, grown=1, spare=spare)
    slots = sum(layout.lengths) + spare * len(kept)
    keys, values = (10 * torch.randn(slots, D, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(rows, G * len(lengths), 1, D, generator=generator, dtype=torch.float64)
    actual = attended_in_runs(sequences, query, keys, values, layout, scale)
    assert actual.shape == (rows, 1, G * len(lengths), D)
    for head, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        span = slice(start, start + length)
        row, first = divmod(head, len(lengths))
        for each in range(first * G, first * G + G):
            logits = keys[span] @ query[row, each, 0] * (D**-0.5 if scale is None else scale)
            assert torch.allclose(actual[row, 0, each], logits.softmax(dim=0) @ values[span], rtol=1e-5, atol=1e-5)


def test_a_session_s_steps_are_those_of_one_call_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(cached_attention, "RUN", 4)
    logits: list[Tensor] = []
    calls: list[Any] = []

    def counted(*given: Any, scale: float | None) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return sequences(*given, scale=scale)

    for served in (False, True):
        monkeypatch.setattr(cached_attention, "_flash", lambda query, served=served: served)
        monkeypatch.setattr(cached_attention, "variable_length", lambda: counted)
        with method("adakv")(model) as run, torch.no_grad():
            model(input_ids=prompt(PROMPT))
            logits.append(step_by_step(model, prompt(NEW), run.cache))
        assert (len(calls) > NEW) == served
    assert relative(logits[1], logits[0]) < TOLERANCE


def test_steps_of_snapkv_on_cuda_use_no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that cuDNN, which prepares a plan for each number of keys, is switched off in steps and on in prompts."""
    model, enabled, attend = build("llama"), set[tuple[bool, bool]](), torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, *given: Any, **options: Any) -> Tensor:
        enabled.add((query.shape[2] == 1, torch.backends.cuda.cudnn_sdp_enabled()))  # type: ignore[no-untyped-call]
        return attend(query, *given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(cached_attention, "_flash", lambda query: True)
    monkeypatch.setattr(cached_attention, "_by_variable_length", lambda *given: False)
    with method("snapkv")(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        step_by_step(model, prompt(NEW), run.cache)
    assert enabled == {(False, True), (True, False)}


@pytest.mark.parametrize("counts", [[[9, 9], [9, 9], [14, 14]], [[9, 9], [9, 7], [14, 14], [14, 14]]])
def test_rows_of_equal_length_are_one_call_of_attention(
    counts: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention runs separately for each head only in rows whose heads store different numbers of tokens."""
    model, calls, attend = build("llama"), list[int](), cached_attention._attended

    def counted(*given: Any) -> Tensor:
        calls.append(len(given[2]))
        return attend(*given)

    monkeypatch.setattr(cached_attention, "_attended", counted)
    full, generator = observe(model, prompt(PROMPT)).cache, torch.Generator().manual_seed(3)
    kept = []
    for row in counts:
        sets = [torch.randperm(PROMPT, generator=generator)[:count].sort().values.numpy() for count in row * 3]
        kept.append(Retention(np.concatenate(sets), np.cumsum([0, *map(len, sets)]), PROMPT, Granularity.HEAD))
    for following in (prompt(NEW, seed=9), prompt(1, seed=9)):
        calls.clear()
        wide = compact(side_by_side(full, len(kept)), Decision(tuple(kept)))
        together = read(model, wide, following.repeat(len(kept), 1), last=1).logits
        assert together is not None
        expected = ([2, 1] if len(kept) == 3 else [1, 1, 1, 2]) * 3
        assert calls[-len(expected) :] == expected  # The first forward pass also checks the model.
        for one, logits in zip(kept, together, strict=True):
            alone = read(model, compact(full, Decision((one,))), following, last=1).logits
            assert alone is not None
            assert relative(logits, alone[0]) < TOLERANCE


N = 64
L, H_KV, CHANNELS = 3, 2, 12


def blocks(layers: list[RetainedLayer]) -> int:
    """Return the bytes of all memory blocks of these layers. Each block is counted once."""
    actual: dict[int, int] = {}
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, Tensor)
            actual[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(actual.values())


@pytest.mark.law("freed-memory")
@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize(("name", "dtype", "width"), [
    ("crystalcache", torch.bfloat16, 2), ("streamingllm", torch.float32, 4), ("fullcache", torch.float32, 4),
])
def test_a_cache_weighs_what_it_keeps(name: str, dtype: torch.dtype, width: int) -> None:
    skip_without_attention(dtype)
    prefilled = prefill(build("llama", dtype=dtype), METHODS[name](), prompt(N))
    assert prefilled.run.kept is not None
    R = len(prefilled.run.kept)
    assert blocks(prefilled.cache.full_layers) == 2 * L * H_KV * CHANNELS * R * width
    assert storage_bytes(prefilled.cache.layers) == 2 * L * H_KV * CHANNELS * R * width
    assert prefilled.run.bytes_freed == 2 * L * H_KV * CHANNELS * (N - R) * width


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


def observing_layer(layer: int) -> RetentionPolicy:
    return CrystalCache(0.5, ENDS, replace(TINY, observed_layer=layer), backend="numpy")


@pytest.mark.law("freed-memory")
@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize(("family", "make", "whole"), [
    *(("llama", partial(observing_layer, layer), [0, 2, 4][: layer + 1] + [0] * (2 - layer)) for layer in range(3)),
    ("gemma3", METHODS["streamingllm"], [0, 0]), ("llama", partial(method, "snapkv"), [0, 0, 0]),
])
def test_one_layer_at_most_is_whole(
    family: str, make: Callable[[], RetentionPolicy], whole: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check full tensors before a layer's keys are stored. Layers up to CrystalCache's observed layer wait for it."""
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


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize(
    ("policy", "least"), [(StreamingLLM(0.125), 0.95 * 22 * 0.875), (CustomPolicy(cake(), 0.125), 24 * 0.875 - 1 - 2)],
)
def test_the_peak_of_a_deep_model_is_what_it_keeps_and_one_layer(policy: RetentionPolicy, least: float) -> None:
    """Compare with a whole prompt, in layers. CAKE's cascade briefly holds copies of two more layers."""
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
        [LayerView(None, keys, None, weight, None) for keys, weight in zip(layer, weights, strict=True)]
        for layer, weights in zip(scores, preferences, strict=True)
    ]
    cache = RetainedCache(LlamaConfig(num_hidden_layers=L))
    method = session_method(policy, budget)
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


@pytest.mark.law("freed-memory")
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
    check_cascade(sizes, [scores[: len(sizes)] for scores in preferences], W, B, H, copies, seed)


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
        actual.append([weight.grad.clone() for weight in weights if weight.grad is not None])
    assert len(actual[0]) >= 4
    for weight, other in zip(*actual, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(weight, other, rtol=1e-9, atol=1e-12)


def check_cascades() -> None:
    """Check cascades of fixed prompts."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(6, 13, 2).tolist()
        preferences = rng.choice(WEIGHTS[: 3 + seed % 9], (4, 2)).tolist()
        check_cascade(sizes, preferences, 1 + seed % 3, int(rng.integers(4, 9)), 2, 1, seed)
