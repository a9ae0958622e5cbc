"""Kept sets per layer, and per layer and KV head, in prompts and turns: kept tokens and freed memory.

Decode steps over such heads in one call need a GPU kernel. The tests compute each of its sequences separately, by the
contract in the kernel's documentation. The runs of a head are merged into the result for the whole head.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration import CustomPolicy, NamedPolicy, RetentionPolicy, StreamingLLM
from models_integration.attention import cached_attention
from models_integration.attention.cached_attention import RUN, attended_in_runs
from models_integration.attention.capture import observing
from models_integration.cache.continuation import Decision
from models_integration.cache.ragged_layer import HeadLayout, RaggedLayer
from models_integration.cache.retained_cache import RetainedCache, storage_bytes
from models_integration.model.architecture import describe
from models_integration.policies.methods import policy_from_name
from models_integration.session.verbs import compact, observe, read, side_by_side
from reference.policies import chunkkv, diverse, snapkv
from reference.policies.describe import describe_policy
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import METHODS, at_once, build, prompt, relative, step_by_step
from tests.models_integration.session.masked import HeadSets, Masked
from tests.models_integration.session.sessions import (
    NEW,
    PROMPT,
    TOLERANCE,
    Looking,
    live_sets,
    method,
    method_of,
    published,
    read_prompt,
    small,
)

pytestmark = pytest.mark.law("eviction-equals-masking")


def stored_in_steps(model: PreTrainedModel, name: str) -> list[HeadSets]:
    """Return the stored positions after the prompt and after each step, under a policy that evicts in steps."""
    with method(name)(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        assert run.cache is not None
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
            for head, own in enumerate(sets):
                new = _grouped(weights[layer].double(), head)
                sums[layer][head] = torch.cat([sums[layer][head], torch.zeros(1, dtype=torch.float64)]) + new
                live = [*stored[step][layer][head], PROMPT + step]
                newest = live[len(live) - len(own) // 2 :]
                others = sorted(set(live) - set(newest), key=lambda at: -float(sums[layer][head][at]))
                assert sorted([*newest, *others[: len(own) - len(newest)]]) == list(own)
        oracle.keep(list(stored[step + 1].values()))


def _weights(oracle: Masked, token: Tensor) -> list[Tensor]:
    """Return the attention weights (H, seen) of one query in each layer, as the eager model reports them."""
    seen: list[Tensor] = []
    modules = [one for one in oracle.model.modules() if type(one).__name__.endswith("Attention")]
    hooks = [one.register_forward_hook(lambda module, args, output: seen.append(output[1][0, :, 0])) for one in modules]
    oracle.read(token)
    for hook in hooks:
        hook.remove()
    return seen


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
        assert run.cache is not None
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
    sets = [own for sets in live_sets(cache).values() for own in sets]
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
    stored = sum(len(own) for sets in live_sets(cache).values() for own in sets)
    assert run.bytes_freed == (tokens * 6 - stored) * 2 * 12 * 4
    assert run.cache is cache
    assert cache.nbytes == storage_bytes(cache.layers) >= stored * 2 * 12 * 4


@pytest.mark.spec("PO-BLOCKS")
@pytest.mark.parametrize("name", ["streamingllm", "keydiff", "adakv", "h2o"])
def test_whole_blocks_after_every_turn(name: str) -> None:
    """Check that each head keeps all or no tokens of each block of four.

    If a policy evicts in steps, the condition holds in the steps too.
    """
    model, seen, before = build("llama"), 0, list[set[int]]([set()] * 6)
    with policy_from_name(name, 0.3, block=4, **small(name))(model):
        cache = RetainedCache(model.config)
        for n, seed in ((PROMPT, 3), (1, 11), (12, 12), (1, 13), (5, 14), (1, 15)):
            at_once(model, prompt(n, seed=seed), cache)
            seen, stored = seen + n, [set(own) for heads in live_sets(cache).values() for own in heads]
            for own, earlier in zip(stored, before, strict=True):
                assert own == {at for first in {i // 4 * 4 for i in own} for at in range(first, min(first + 4, seen))}
                assert {*range(seen // 4 * 4, seen)} <= own <= earlier | {*range(seen - n, seen)}
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
        for head, own in enumerate(heads):
            stored = torch.tensor([*before[layer][head], *range(PROMPT, PROMPT + 12)])
            assert list(own) == stored[norms[head, stored].argsort()[:B]].sort().values.tolist()


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
        own = slice(start, start + length)
        row, first = divmod(head, len(lengths))
        for each in range(first * G, first * G + G):
            logits = keys[own] @ query[row, each, 0] * (D**-0.5 if scale is None else scale)
            assert torch.allclose(actual[row, 0, each], logits.softmax(dim=0) @ values[own], rtol=1e-5, atol=1e-5)


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
            assert run.cache is not None
            logits.append(step_by_step(model, prompt(NEW), run.cache))
        assert (len(calls) > NEW) == served
    assert relative(logits[1], logits[0]) < TOLERANCE


@pytest.mark.parametrize("counts", [[[9, 9], [9, 9], [14, 14]], [[9, 9], [9, 7], [14, 14], [14, 14]]])
def test_rows_of_equal_length_are_one_call_of_attention(
    counts: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check rows in which each head keeps different tokens.

    Attention runs separately for each head only in rows whose heads store different numbers of tokens.
    """
    model, calls, attend = build("llama"), list[int](), cached_attention._attended

    def counted(*given: Any) -> Tensor:
        calls.append(len(given[2]))
        return attend(*given)

    monkeypatch.setattr(cached_attention, "_attended", counted)
    full, generator = observe(model, prompt(PROMPT)).cache, torch.Generator().manual_seed(3)
    kept = []
    for row in counts:
        own = [torch.randperm(PROMPT, generator=generator)[:count].sort().values.numpy() for count in row * 3]
        kept.append(Retention(np.concatenate(own), np.cumsum([0, *map(len, own)]), PROMPT, Granularity.HEAD))
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
