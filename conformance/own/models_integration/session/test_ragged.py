"""Kept sets per layer, and per layer and KV head: eviction equals masking, and the evicted memory is free."""

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.crossings import crossed
from conformance.own.models_integration.session.families import (
    FAMILIES,
    at_once,
    build,
    greedy,
    prompt,
    relative,
    step_by_step,
)
from conformance.own.models_integration.session.heads import MaskedHeads
from conformance.own.models_integration.session.oracle_checks import NEW, PROMPT, TOLERANCE
from conformance.own.models_integration.session.ragged_checks import (
    check_continuation,
    check_steps,
    check_storage,
    lengths,
    live_sets,
    method,
    read_prompt,
    small,
)
from models_integration import StreamingLLM
from models_integration.attention import capture
from models_integration.attention.capture import observing
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache, storage_bytes
from models_integration.model.architecture import describe
from reference.policies.describe import list_policies
from reference.policies.names import make_policy
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.retention import Granularity, Retention

pytestmark = pytest.mark.law("eviction-equals-masking")

AT_THE_PROMPT = (
    "snapkv", "pyramidkv", "adakv", "chunkkv", "nestedkv", "lagkv", "cake", "kvcrush", "criticalkv", "critical-adakv",
    "kvzip", "kvzip-plus",
)
"""They differ in what a session does for them; tests of turns take every name, on one family."""
IN_STEPS = [one.name for one in list_policies() if one.decode_time and "calibration" not in one.required]

@crossed("name", ["kvzip", "kvzip-plus"])
def test_eviction_equals_masking(family: str, name: str) -> None:
    check_continuation(build(family), name)


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", AT_THE_PROMPT)
def test_a_head_stores_its_own_tokens(name: str) -> None:
    check_storage(build("llama"), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_under_h2o_equals_masking(family: str) -> None:
    stored = check_steps(build(family), "h2o")
    for step, (before, after) in enumerate(pairwise(stored)):
        for layer, sets in after.items():
            assert [len(own) for own in sets] == [parse_budget(0.3).tokens(PROMPT + 1 + step)] * len(sets)
            grown = [[*own, PROMPT + step] for own in before[layer]]
            assert all(set(own) <= set(more) for own, more in zip(sets, grown, strict=True))


@pytest.mark.parametrize("name", [name for name in IN_STEPS if name != "h2o"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_decoding_under_other_policies_equals_masking(family: str, name: str) -> None:
    stored = check_steps(build(family), name)
    sizes = [len(next(iter(sets.values()))[0]) for sets in stored]
    assert sizes == lengths(make_policy(name, small(name)), parse_budget(0.3), NEW)
    assert sizes[0] == 20
    assert min(sizes[1:]) < sizes[0] + NEW


@pytest.mark.spec("PO-TOVA")
def test_tova_drops_the_least_attended_key_of_the_last_query() -> None:
    model = build("llama", attention="eager")
    stored = check_steps(model, "tova")
    oracle, following = MaskedHeads(model, prompt(PROMPT), stored[0]), prompt(NEW, seed=9)
    for step, token in enumerate(torch.split(following, 1, dim=1)):
        weights = _weights(oracle, token)
        for layer, sets in stored[step + 1].items():
            live = [*stored[step][layer][0], PROMPT + step]
            order = sorted(live, key=lambda at: (-float(weights[layer][:, at].double().mean()), at))
            assert sorted(order[: len(sets[0])]) == list(sets[0])
            oracle.forget(layer, sets)


@pytest.mark.spec("PO-H2O")
def test_h2o_drops_the_smallest_sum() -> None:
    model = build("llama", attention="eager")
    stored = check_steps(model, "h2o")
    with torch.no_grad():
        first = model(input_ids=prompt(PROMPT), output_attentions=True).attentions
    sums = [[_grouped(weights[0].double().sum(dim=1), head) for head in range(2)] for weights in first]
    oracle, following = MaskedHeads(model, prompt(PROMPT), stored[0]), prompt(NEW, seed=9)
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
            oracle.forget(layer, sets)


def _weights(oracle: MaskedHeads, token: Tensor) -> list[Tensor]:
    """Attention of one query in each layer, (H, seen): what the eager model itself reports."""
    seen: list[Tensor] = []
    modules = [one for one in oracle.model.modules() if type(one).__name__.endswith("Attention")]
    hooks = [one.register_forward_hook(lambda module, args, output: seen.append(output[1][0, :, 0])) for one in modules]
    oracle.read(token)
    for hook in hooks:
        hook.remove()
    return seen


def _grouped(heads: Tensor, head: int) -> Tensor:
    return heads[2 * head : 2 * head + 2].sum(dim=0)


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv", "chunkkv", "h2o", "tova"])
def test_a_full_budget_is_the_model_itself_bit_for_bit(family: str, name: str) -> None:
    model, ids, following = build(family), prompt(PROMPT), prompt(4, seed=9)
    with method(name, 1.0)(model) as run, torch.no_grad():
        first = model(input_ids=ids)
        assert run.cache is not None
        steps = step_by_step(model, following, run.cache)
    with torch.no_grad():
        plain = model(input_ids=ids)
        expected = step_by_step(model, following, plain.past_key_values)
    assert torch.equal(first.logits, plain.logits)
    assert torch.equal(steps, expected)
    assert run.bytes_freed == 0


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", ["nestedkv", "adakv", "snapkv", "pyramidkv", "chunkkv"])
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


@pytest.mark.law("freed-memory")
def test_no_tensor_of_the_full_cache_is_left() -> None:
    # N is no other size in this model.
    n = 83
    with method("adakv")(build("llama")) as run, torch.no_grad():
        run._model(input_ids=prompt(n))
    gc.collect()
    sizes = {tuple(one.shape) for one in gc.get_objects() if type(one) is Tensor}
    assert not [shape for shape in sizes if len(shape) == 4 and n in shape]


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("name", ["adakv", "pyramidkv", "chunkkv", "h2o", "tova", "rkv"])
def test_rows_of_a_padded_batch_equal_their_single_runs(name: str) -> None:
    model, lengths = build("llama"), (64, 47)
    ids, mask = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int64)
    alone = []
    for row, n in enumerate(lengths):
        own = prompt(n, seed=40 + row)
        ids[row, 64 - n :], mask[row, 64 - n :] = own[0], 1
        with method(name)(model) as run:
            alone.append(greedy(model, own, NEW)[0])
        assert run.cache is not None
        alone_sets = live_sets(run.cache)
    with method(name)(model) as run:
        together = greedy(model, ids, NEW, attention_mask=mask)
    assert torch.equal(together, torch.stack(alone))
    assert run.cache is not None
    for index, sets in alone_sets.items():
        layer = run.cache.layers[index]
        assert isinstance(layer, RetainedLayer)
        assert [layer.head_positions(1, head).tolist() for head in range(layer.heads)] == list(sets)


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("name", ["adakv", "h2o"])
def test_beams_carry_their_heads_along(name: str) -> None:
    model, ids = build("llama"), prompt(PROMPT)
    with method(name)(model):
        found: Any = model.generate(  # type: ignore[operator]  # generation methods come from a mixin without types
            input_ids=ids, max_new_tokens=NEW, num_beams=3, num_return_sequences=3, do_sample=False,
            return_dict_in_generate=True, output_scores=True,
        )
    for tokens, score in zip(found.sequences[:, PROMPT:], found.sequences_scores, strict=True):
        with method(name)(model) as run, torch.no_grad():
            logits = model(input_ids=ids).logits[:, -1:]
            assert run.cache is not None
            logits = torch.cat([logits, step_by_step(model, tokens[None, :-1], run.cache)], dim=1)
        chosen = logits[0].log_softmax(dim=-1).gather(1, tokens[:, None])
        assert float(chosen.mean()) == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize("name", ["adakv", "chunkkv"])
def test_a_2d_mask_hides_positions_in_every_head(name: str) -> None:
    model, following = build("llama"), prompt(NEW, seed=9)
    _, cache = read_prompt(model, method(name))
    kept = live_sets(cache)
    hidden = kept[2][0][4]
    mask = torch.ones(1, PROMPT + NEW, dtype=torch.int64)
    mask[0, hidden] = 0
    shown = {layer: [[at for at in own if at != hidden] for own in sets] for layer, sets in kept.items()}
    expected = MaskedHeads(model, prompt(PROMPT), shown).read(following)
    with observing(describe(model), cache):
        assert relative(at_once(model, following, cache, attention_mask=mask), expected) < TOLERANCE


def ragged(rows: int = 1, keep: Any = None) -> tuple[RetainedCache, list[list[int]]]:
    """A cache of one prompt whose heads keep other tokens, in each of `rows` equal rows."""
    model = build("llama")
    with method("snapkv", 1.0)(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT).repeat(rows, 1))
    assert run.cache is not None
    sets = [[0, 3, 9, 60], [1, 9], [5, 63], [2, 3, 4], [0, 1, 2, 3, 4], [62]]
    flat = torch.tensor([at for own in sets for at in own]).numpy()
    offsets = torch.tensor([0, 4, 6, 8, 11, 16, 17]).numpy()
    run.cache.compact([Retention(flat, offsets, PROMPT, Granularity.HEAD)] * rows)
    return run.cache, sets


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("taken_back", [0, 1, 3, 5])
def test_the_last_tokens_can_be_taken_back(taken_back: int) -> None:
    model = build("llama")
    cache, sets = ragged()
    following, again = prompt(3, seed=9), prompt(4, seed=11)
    with observing(describe(model), cache):
        at_once(model, following, cache)
        cache.crop(-taken_back)
        found = at_once(model, again, cache)
    left = PROMPT + 3 - taken_back
    kept = {layer: [[at for at in own if at < left] for own in sets[2 * layer : 2 * layer + 2]] for layer in range(3)}
    oracle = MaskedHeads(model, prompt(PROMPT)[:, :left], kept)
    if left > PROMPT:
        oracle.read(following[:, : left - PROMPT])
    # A head without a token has nothing to attend to in the oracle's first query but itself: the same here.
    assert relative(found, oracle.read(again)) < TOLERANCE


@pytest.mark.law("a-cache-like-any-other")
def test_rows_can_be_chosen_again() -> None:
    cache, _ = ragged(rows=2)
    layer = cache.full_layers[0]
    assert isinstance(layer, RaggedLayer)
    layer.plan_keep([[torch.tensor([0, 3]), torch.tensor([9])], [torch.tensor([60]), torch.tensor([1, 9])]])()
    keys = [one[0].clone() for one in layer.segments()]
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([False, True, True, True]))
    layer.reorder_cache(torch.tensor([1, 0, 2]))
    expected = [keys[2], keys[3], keys[0], keys[1], keys[2], keys[3]]
    assert all(torch.equal(one[0], own) for one, own in zip(layer.segments(), expected, strict=True))
    assert [layer.head_positions(row, 1).tolist() for row in range(3)] == [[1, 9], [9], [1, 9]]


@pytest.mark.law("a-cache-like-any-other")
def test_a_reset_cache_is_as_new() -> None:
    cache, _ = ragged()
    cache.reset()
    assert [type(layer) for layer in cache.layers] == [DenseLayer] * 3
    assert (cache.get_seq_length(), cache.layers_differ) == (0, False)
    with method("adakv")(build("llama")) as run, torch.no_grad():
        run._model(input_ids=prompt(PROMPT), past_key_values=cache)
    assert run.cache is cache


@pytest.mark.law("the-model-stays-as-it-was")
def test_nothing_is_left_on_the_modules() -> None:
    model = build("llama")
    read_prompt(model, method("adakv"))
    assert not {id(one) for one in model.modules()} & {id(one) for one in capture._READS}


@pytest.mark.law("a-cache-like-any-other")
def test_inference_mode_can_end_between_prompt_and_steps() -> None:
    model, following = build("llama"), prompt(NEW, seed=9)
    with method("adakv")(model) as run:
        with torch.inference_mode():
            model(input_ids=prompt(PROMPT))
        assert run.cache is not None
        kept = live_sets(run.cache)
        found = step_by_step(model, following, run.cache)
    assert relative(found, MaskedHeads(model, prompt(PROMPT), kept).read(following)) < TOLERANCE


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("name", "each", "groups"), [("snapkv", "layer and KV head", 6), ("chunkkv", "layer", 3)])
def test_sets_of_layers_and_heads_are_not_one_set(name: str, each: str, groups: int) -> None:
    """`kept` is one ascending set or names what has each of them; `repr` has their mean."""
    model = build("llama")
    run, cache = read_prompt(model, method(name))
    assert isinstance(run.retention, Retention)
    for holder in (run, run.retention):
        with pytest.raises(SpecError, match=rf"kept = '{groups} kept sets': each {each} has its own"):
            _ = holder.kept
    sets = [own for sets in live_sets(cache).values() for own in sets]
    assert [run.retention.group(i).tolist() for i in range(groups)] == sets[:: len(sets) // groups]
    assert (run.seen, run.stored) == (PROMPT, cache.mean_length)
    assert repr(run) == (
        f"Session('{name}', budget=0.3, seen={PROMPT}, stored={cache.mean_length:g}, bytes_freed={run.bytes_freed})"
    )


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "streamingllm"])
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
