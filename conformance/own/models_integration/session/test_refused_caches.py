"""What cannot follow on a cache is refused by name and changes nothing: retentions, crops, turns and records."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import METHODS, at_once, build, prompt
from conformance.own.models_integration.session.sessions import (
    PROMPT,
    batch,
    live_sets,
    method,
    prompts,
    read_prompt,
)
from models_integration import CustomPolicy, FullCache, Published, RetainedCache, RetentionPolicy, StreamingLLM, prefill
from models_integration.attention.capture import observing
from models_integration.cache.snapshot import save_cache
from models_integration.model.architecture import describe
from reference.policies import chunkkv, diverse, h2o, snapkv, with_adaptive_budgets
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.retention import Granularity, Retention

pytestmark = pytest.mark.law("refused-before-anything-changes")

Act = Callable[[Any], object]


def heads(groups: int, seen: int = PROMPT, at: int = 3, kind: Granularity = Granularity.HEAD) -> Retention:
    """Each group keeps one position."""
    return Retention(torch.full((groups,), at).numpy(), torch.arange(groups + 1).numpy(), seen, kind)


RETENTIONS: list[tuple[Retention, str]] = [
    (heads(5), "5 groups"), (heads(3), "3 groups"), (heads(2, kind=Granularity.LAYER), "2 groups"),
    (heads(6, seen=40), "the cache has seen 64"), (heads(6, at=50), "must be among the"),
]


def ragged() -> tuple[RetainedCache, list[list[int]]]:
    """A cache of one prompt whose heads keep other tokens."""
    cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    sets = [[0, 3, 9, 60], [1, 9], [5, 63], [2, 3, 4], [0, 1, 2, 3, 4], [62]]
    offsets = np.cumsum([0, *map(len, sets)])
    cache.compact([Retention(np.concatenate(sets), offsets, PROMPT, Granularity.HEAD)])
    return cache, sets


@pytest.mark.parametrize("split", [False, True])
def test_a_retention_about_something_else_is_refused(split: bool) -> None:
    cache = ragged()[0] if split else prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    if not split:
        cache.full_layers[0].retain(torch.arange(10))
    before, tensors = live_sets(cache), [layer.keys for layer in cache.full_layers]
    for retention, words in RETENTIONS:
        with pytest.raises(SpecError, match=words):
            cache.compact([retention])
    assert live_sets(cache) == before
    assert all(layer.keys is own for layer, own in zip(cache.full_layers, tensors, strict=True))


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("model_wide", [False, True])
def test_a_compaction_that_one_layer_refuses_changes_none(model_wide: bool) -> None:
    """All layers but the last store position 3."""
    cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    cache.full_layers[-1].retain(torch.arange(10, 60))
    before = live_sets(cache)
    with pytest.raises(SpecError, match="must be among the"):
        cache.compact([Retention.shared(np.array([3]), PROMPT) if model_wide else heads(6)])
    assert live_sets(cache) == before


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    """Heads of the first layer differ and could give back more than the padded rows of the others."""
    model, mask = build("llama"), torch.tensor([[0] + [1] * (PROMPT - 1)])
    with FullCache()(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT), attention_mask=mask)
    cache = run.cache
    assert cache is not None
    sets = [range(40), range(30), *[range(20)] * 4]
    offsets = np.cumsum([0, *map(len, sets)])
    cache.compact([Retention(np.concatenate(sets), offsets, PROMPT - 1, Granularity.HEAD)])
    before = live_sets(cache)
    with pytest.raises(SpecError, match="rows that differ can give back 0 so far"):
        cache.crop(-40)
    for tokens in (1, -70):
        with pytest.raises(SpecError, match="tokens_to_remove"):
            cache.full_layers[0].crop(tokens)
    assert live_sets(cache) == before
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("name", ["adakv", "chunkkv", "crystalcache"])
def test_what_differs_can_be_read_inside_the_context_only(name: str) -> None:
    """Layers or heads of one row; or rows."""
    model, rows = build("llama"), 3 if name == "crystalcache" else 1
    ids, mask = batch(prompts()) if rows > 1 else (prompt(PROMPT), torch.ones(1, PROMPT, dtype=torch.int64))
    cache = RetainedCache(model.config)
    with method(name)(model):
        at_once(model, ids, cache, attention_mask=mask)
    before = live_sets(cache)
    for n in (1, 3):
        with pytest.raises(SpecError, match="can be read inside the context manager only"):
            at_once(model, prompt(n).repeat(rows, 1), cache)
    assert live_sets(cache) == before


def test_a_4d_mask_and_weights_know_nothing_of_heads() -> None:
    model = build("llama", attention="eager")
    with method("adakv")(model) as run, torch.no_grad():
        first = model(input_ids=prompt(PROMPT), output_attentions=True)
        assert [tuple(one.shape) for one in first.attentions] == [(1, 4, PROMPT, PROMPT)] * 3
        assert run.cache is not None
        before = live_sets(run.cache)
        with pytest.raises(SpecError, match="output_attentions = True: heads that store different tokens"):
            model(input_ids=prompt(1), past_key_values=run.cache, output_attentions=True)
        assert live_sets(run.cache) == before
    mask = torch.ones(1, 1, 8, 27, dtype=torch.bool)
    with observing(describe(model), run.cache), torch.no_grad(), pytest.raises(SpecError, match="attention_mask"):
        model(input_ids=prompt(8), past_key_values=run.cache, attention_mask=mask)


TURNS: list[tuple[str, Callable[[], RetentionPolicy], str]] = [
    ("adakv", lambda: StreamingLLM(20), "keeps one set for the whole model"),
    ("adakv", lambda: method("chunkkv"), "keeps one set for a whole layer"),
    ("adakv", lambda: Published("defensivekv", 0.3, W=8), "compares layers or heads token by token"),
    ("snapkv", lambda: CustomPolicy(diverse(snapkv(W=8)), parse_budget(0.3)), "layers or heads token by token"),
    ("chunkkv", lambda: CustomPolicy(chunkkv(W=8, N_reuse=2), 0.3), "layers or heads token by token"),
    ("tova", lambda: method("h2o"), "h2o continues only caches made by h2o"),
    ("adakv", lambda: method("h2o"), "h2o continues only caches made by h2o"),
    ("streamingllm", METHODS["crystalcache"], "under a different policy"),
]


@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize(("before", "after", "words"), TURNS)
def test_a_turn_that_cannot_be_decided_is_named(before: str, after: Callable[[], Any], words: str) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method(before))
    kept = live_sets(cache)
    with after()(model), torch.no_grad(), pytest.raises(SpecError, match=words):
        model(input_ids=prompt(8), past_key_values=cache)
    assert live_sets(cache) == kept
    assert cache.get_seq_length() == PROMPT


def grown_elsewhere(cache: RetainedCache) -> None:
    model = build("llama")
    with observing(describe(model), cache):
        at_once(model, prompt(1), cache)


SPOILED: list[tuple[str, Act]] = [
    ("tova", lambda cache: None), ("h2o", grown_elsewhere), ("h2o", lambda cache: cache.crop(-1)),
]


@pytest.mark.parametrize(("name", "spoil"), SPOILED)
def test_a_policy_goes_on_from_its_own_records_only(name: str, spoil: Act) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method(name))
    spoil(cache)
    with method("h2o")(model), torch.no_grad(), pytest.raises(SpecError, match="tokens without records"):
        model(input_ids=prompt(1), past_key_values=cache)


def test_steps_need_equal_shares_and_their_records_are_not_saved(tmp_path: Path) -> None:
    model, chosen = build("llama"), CustomPolicy(with_adaptive_budgets(h2o()), parse_budget(0.3))
    with chosen(model), torch.no_grad(), pytest.raises(SpecError, match="only with equal shares"):
        model(input_ids=prompt(PROMPT))
    _, cache = read_prompt(model, method("h2o"))
    with pytest.raises(SpecError, match=r"cache = 'h2o': keeps records of single tokens, .* as snapkv, or"):
        save_cache(cache, model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_window_above_the_budget_or_a_budget_above_the_prompt_is_served() -> None:
    model = build("llama")
    run, cache = read_prompt(model, method("snapkv", 3))
    assert (cache.mean_length, run.over_budget) == (8, 0)
    assert read_prompt(model, method("snapkv", 1.0), 5)[1].mean_length == 5


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("form", ["one set", "first split", "split before"])
def test_memory_that_runs_out_between_two_layers_makes_the_cache_unusable(
    form: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers have lost tokens, others have not: nothing may be read from that."""
    cache, sets = ragged()
    retention = replace(heads(6), positions=np.array([own[0] for own in sets]))
    if form != "split before":
        cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    if form == "one set":
        retention = Retention.shared(np.arange(9), PROMPT)
    gather, calls = torch.Tensor.index_select, []

    def full(tensor: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        if len(calls) > (9 if form == "first split" else 3):
            raise torch.OutOfMemoryError("no memory left")
        return gather(tensor, *rest)

    monkeypatch.setattr(torch.Tensor, "index_select", full)
    with pytest.raises(torch.OutOfMemoryError):
        cache.compact([retention])
    monkeypatch.undo()
    with pytest.raises(SpecError, match="a compaction failed half way; start again with a new one"):
        cache.get_seq_length()
