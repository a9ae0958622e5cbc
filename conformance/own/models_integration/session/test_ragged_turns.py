"""Later turns where layers and heads store different tokens: eviction equals masking after each, under every policy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import at_once, build, greedy, prompt, relative
from conformance.own.models_integration.session.heads import MaskedHeads
from conformance.own.models_integration.session.oracle_checks import PROMPT, TOLERANCE
from conformance.own.models_integration.session.ragged_checks import Sets, live_sets, small
from conformance.own.models_integration.session.test_published import PUBLISHED, calibrated
from models_integration import Published, RetainedCache, RetentionPolicy
from models_integration.policies.methods import policy_from_name
from reference.policies.describe import list_policies
from reference.policies.names import DIVERSE, NAMES
from spec.budget import parse_budget
from spec.retention import Granularity

TURNS = ((1, 11), (12, 12), (1, 13), (5, 14), (1, 15))
"""Tokens and seed: steps between turns."""
ONE_SEGMENT = [one.name for one in list_policies() if not one.later_turns]


def published(name: str, model: Any, budget: float = 0.3) -> RetentionPolicy:
    """With constants that fit a prompt of 64 tokens; signatures are a head's own, where kept sets are."""
    host = name.removeprefix(DIVERSE)
    constants: dict[str, Any] = {**small(host), **calibrated(host, model)}
    policy = policy_from_name(host, budget, **constants)
    if name.startswith(DIVERSE) and policy.on(model).policy.granularity is Granularity.HEAD:
        constants["signature"] = "head"
    return policy_from_name(name, budget, **constants)


def check_turns(name: str, family: str) -> None:
    """Masking holds; what a head stores never exceeds the rule."""
    model = build(family)
    for n, seen, after in masked_turns(published(name, model), model, build(family)):
        if n > 1:
            stored = sum(len(own) for heads in after.values() for own in heads)
            assert stored == parse_budget(0.3).tokens(seen) * sum(map(len, after.values()))


def masked_turns(policy: RetentionPolicy, model: Any, twin: Any) -> Iterator[tuple[int, int, Sets]]:
    """Logits of every forward equal those of the full cache under masks; its tokens, all seen, what is stored."""
    sets, logits = [], []
    with policy(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        assert run.cache is not None
        sets.append(live_sets(run.cache))
        for n, seed in TURNS:
            logits.append(at_once(model, prompt(n, seed=seed), run.cache))
            sets.append(live_sets(run.cache))
    oracle, seen = MaskedHeads(twin, prompt(PROMPT), sets[0]), PROMPT
    for (n, seed), found, before, after in zip(TURNS, logits, sets[:-1], sets[1:], strict=True):
        assert relative(found, oracle.read(prompt(n, seed=seed))) < TOLERANCE
        seen += n
        for layer, heads in after.items():
            oracle.forget(layer, heads)
            for own, earlier in zip(heads, before[layer], strict=True):
                assert set(own) <= {*earlier, *range(seen - n, seen)}
        yield n, seen, after


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", ["streamingllm", *(name for name in PUBLISHED if name not in ONE_SEGMENT)])
def test_eviction_equals_masking_after_every_turn(name: str) -> None:
    check_turns(name, "llama")


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", ["diverse-adakv", "diverse-keydiff", "diverse-triattention", "diverse-rkv"])
def test_with_set_conditioned_selection_too(name: str) -> None:
    check_turns(name, "llama")


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-BLOCKS")
@pytest.mark.parametrize("name", ["streamingllm", "keydiff", "adakv", "h2o"])
def test_whole_blocks_after_every_turn(name: str) -> None:
    """Of the text's own blocks of four each head holds all or none; those that decide in steps, in steps too."""
    model = build("llama")
    policy = policy_from_name(name, 0.3, block=4, **small(name))
    for _, seen, after in masked_turns(policy, model, build("llama")):
        for own in (own for heads in after.values() for own in heads):
            assert {*own} == {at for first in {i // 4 * 4 for i in own} for at in range(first, min(first + 4, seen))}
            assert {*range(seen // 4 * 4, seen)} <= {*own}


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["adakv", "h2o", "chunkkv"])
def test_beside_sliding_layers_and_norms(name: str, family: str) -> None:
    check_turns(name, family)


def check_small_keys_stay() -> None:
    """Knorm after a turn: of what a head stored, the smallest of the model's own keys."""
    model, twin = build("llama"), build("llama")
    with published("knorm", model)(model) as run:
        at_once(model, prompt(PROMPT), cache := RetainedCache(model.config))
        before = live_sets(cache)
        at_once(model, prompt(12, seed=12), cache)
    assert run.retention is not None
    oracle = MaskedHeads(twin, prompt(PROMPT), before)
    oracle.read(prompt(12, seed=12))
    B = parse_budget(0.3).tokens(PROMPT + 12)
    for layer, heads in live_sets(cache).items():
        norms = list(oracle.cache)[layer][0][0].norm(dim=-1)
        for head, own in enumerate(heads):
            stored = torch.tensor([*before[layer][head], *range(PROMPT, PROMPT + 12)])
            assert list(own) == stored[norms[head, stored].argsort()[:B]].sort().values.tolist()


@pytest.mark.spec("PO-TURN")
def test_a_turn_is_decided_over_each_head_s_own_keys() -> None:
    check_small_keys_stay()


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", ["adakv", "h2o", "pyramidkv"])
def test_a_turn_in_pieces_is_one_turn(name: str) -> None:
    model, kept = build("llama"), []
    for pieces in ([12], [5, 6, 1]):
        with published(name, model)(model) as run:
            at_once(model, prompt(PROMPT), cache := RetainedCache(model.config))
            with run.prompt():
                for ids in torch.split(prompt(12, seed=12), pieces, dim=1):
                    at_once(model, ids, cache)
        kept.append(live_sets(cache))
    assert kept[0] == kept[1]


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", ["adakv", "h2o", "chunkkv", "rkv", "triattention-by-head"])
def test_turns_of_padded_rows_equal_their_single_runs(name: str) -> None:
    model, lengths = build("llama"), (64, 47)
    chosen, turns = published(name, model), [prompt(12, seed=20), prompt(12, seed=21)]
    ids, mask = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int64)
    alone: list[tuple[Tensor, Any]] = []
    for row, n in enumerate(lengths):
        own = prompt(n, seed=40 + row)
        ids[row, 64 - n :], mask[row, 64 - n :] = own[0], 1
        with chosen(model):
            at_once(model, own, cache := RetainedCache(model.config))
            found = [at_once(model, one, cache) for one in (turns[row], prompt(1), prompt(3, seed=5))]
        alone.append((found[-1], live_sets(cache)))
    with chosen(model):
        at_once(model, ids, cache := RetainedCache(model.config), attention_mask=mask)
        for one in (torch.cat(turns), prompt(1).repeat(2, 1), prompt(3, seed=5).repeat(2, 1)):
            together = at_once(model, one, cache)
    for row, (logits, sets) in enumerate(alone):
        assert relative(together[row : row + 1], logits) < TOLERANCE
        for index, heads in sets.items():
            layer = cache.full_layers[index]
            assert [layer.head_positions(row, head).tolist() for head in range(layer.heads)] == list(heads)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", ["adakv", "chunkkv"])
def test_generate_takes_a_second_turn(name: str) -> None:
    """The whole conversation is passed again, with the cache of the first turn."""
    model, twin, chosen = build("llama"), build("llama"), published(name, build("llama"))
    cache, sets = RetainedCache(model.config), []
    with chosen(model):
        first = greedy(model, prompt(PROMPT), 4, past_key_values=cache)
        sets.append(live_sets(cache))
        asked = torch.cat([prompt(PROMPT), first, prompt(12, seed=12)], dim=1)
        second = greedy(model, asked, 4, past_key_values=cache)
        sets.append(live_sets(cache))
    read = asked[:, : PROMPT + 3]
    kept = {layer: [[at for at in own if at < PROMPT] for own in heads] for layer, heads in sets[0].items()}
    oracle = MaskedHeads(twin, prompt(PROMPT), kept)
    for token in torch.split(read[:, PROMPT:], 1, dim=1):
        oracle.read(token)
    logits = oracle.read(asked[:, PROMPT + 3 :])
    for layer, heads in sets[1].items():
        oracle.forget(layer, [[at for at in own if at < asked.shape[1]] for own in heads])
    chosen_ids = [int(logits[0, -1].argmax())]
    while len(chosen_ids) < 4:
        chosen_ids.append(int(oracle.read(torch.tensor([chosen_ids[-1:]]))[0, -1].argmax()))
    assert second[0].tolist() == chosen_ids


@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(DIVERSE)])
def test_no_diversity_is_the_policy_itself_bit_for_bit(name: str) -> None:
    """lambda = 0 in a session: kept sets, logits and stored tensors, at each policy's own granularity."""
    model, found = build("llama"), []
    base = published(name.removeprefix(DIVERSE), model)
    constants = base.constants if isinstance(base, Published) else {}
    for chosen in (base, Published(name, 0.3, **constants, diversity=0.0)):
        with chosen(model) as run, torch.no_grad():
            model(input_ids=prompt(PROMPT))
            assert run.cache is not None
            logits = at_once(model, prompt(1, seed=8), run.cache)
        stored: list[Any] = [layer.keys for layer in run.cache.full_layers]
        found.append((live_sets(run.cache), logits, stored))
    (sets, logits, keys), (others, same, equal) = found
    assert sets == others
    assert torch.equal(logits, same)
    assert all(isinstance(one, Tensor) for one in keys)
    assert all(map(torch.equal, keys, equal))
