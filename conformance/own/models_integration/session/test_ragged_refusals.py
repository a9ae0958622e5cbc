"""Bad input where layers and heads keep different tokens: named errors, before anything changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import build, prompt
from conformance.own.models_integration.session.oracle_checks import NEW, PROMPT
from conformance.own.models_integration.session.ragged_checks import live_sets, method, read_prompt
from conformance.own.models_integration.session.test_ragged import ragged
from models_integration import CustomPolicy, FullCache, Published, RetainedCache, RetentionPolicy, StreamingLLM, prefill
from models_integration.attention.capture import observing
from models_integration.cache.snapshot import save_cache
from models_integration.model.architecture import describe
from reference.policies import chunkkv, diverse, h2o, snapkv, with_adaptive_budgets
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.retention import Granularity, Retention

pytestmark = pytest.mark.law("refused-before-anything-changes")


def heads(groups: int, seen: int = PROMPT, at: int = 3) -> Retention:
    """Each group keeps one position."""
    return Retention(
        torch.full((groups,), at).numpy(), torch.arange(groups + 1).numpy(), seen, Granularity.HEAD
    )


@pytest.mark.parametrize(
    ("retention", "words"),
    [
        (heads(5), "5 groups"),
        (heads(3), "3 groups"),
        (heads(6, seen=40), "the cache has seen 64"),
        (heads(6, at=50), "must be among the"),
        (Retention(torch.arange(4).numpy(), torch.tensor([0, 2, 4]).numpy(), PROMPT, Granularity.LAYER), "2 groups"),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_retention_about_something_else_is_refused(retention: Retention, words: str, split: bool) -> None:
    if split:
        cache, _ = ragged()
    else:
        cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
        if "among" in words:
            cache.full_layers[0].retain(torch.arange(10))
    before = live_sets(cache)
    with pytest.raises(SpecError, match=words):
        cache.compact([retention])
    assert live_sets(cache) == before


def one_layer_lacks_it(cache: RetainedCache) -> Retention:
    """All layers but the last store position 3."""
    cache.full_layers[-1].retain(torch.arange(10, 60))
    return heads(6)


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("model_wide", [False, True])
def test_a_compaction_that_fails_in_the_last_layer_has_changed_no_layer(model_wide: bool) -> None:
    cache = prefill(build("llama"), FullCache(), prompt(PROMPT)).cache
    retention = one_layer_lacks_it(cache)
    if model_wide:
        retention = Retention.shared(retention.positions[:1], PROMPT)
    before, tensors = live_sets(cache), [layer.keys for layer in cache.full_layers]
    with pytest.raises(SpecError, match="must be among the"):
        cache.compact([retention])
    assert live_sets(cache) == before
    assert all(layer.keys is own for layer, own in zip(cache.full_layers, tensors, strict=True))


def one_each(sets: list[list[int]]) -> Retention:
    return replace(heads(6), positions=np.array([own[0] for own in sets]))


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("form", ["one set", "first split", "split before"])
def test_memory_that_runs_out_between_two_layers_makes_the_cache_unusable(
    form: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers have lost tokens, others have not: nothing may be read from that."""
    cache, sets = ragged()
    retention = one_each(sets)
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


@pytest.mark.parametrize("name", ["adakv", "chunkkv", "pyramidkv"])
def test_it_can_be_read_inside_the_context_only(name: str) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method(name))
    before = live_sets(cache)
    for ids in (prompt(1), prompt(NEW)):
        with torch.no_grad(), pytest.raises(SpecError, match="can be read inside the context manager only"):
            model(input_ids=ids, past_key_values=cache)
    assert live_sets(cache) == before
    assert cache.get_seq_length() == PROMPT


def test_a_4d_mask_knows_nothing_of_heads() -> None:
    model = build("llama")
    _, cache = read_prompt(model, method("adakv"))
    mask = torch.ones(1, 1, NEW, 27, dtype=torch.bool)
    with observing(describe(model), cache), torch.no_grad(), pytest.raises(SpecError, match="attention_mask"):
        model(input_ids=prompt(NEW), past_key_values=cache, attention_mask=mask)


REFUSED_TURNS: dict[str, tuple[str, Callable[[PreTrainedModel], RetentionPolicy], str]] = {
    "one set for the model": ("adakv", lambda model: StreamingLLM(20), "keeps one set for the whole model"),
    "one set for a layer": ("adakv", lambda model: method("chunkkv"), "keeps one set for a whole layer"),
    "a share of each token": (
        "adakv", lambda model: Published("defensivekv", 0.3, W=8), "compares layers or heads token by token",
    ),
    "signatures of all heads": (
        "snapkv", lambda model: CustomPolicy(diverse(snapkv(W=8)), parse_budget(0.3)), "layers or heads token by token",
    ),
    "scores of another layer": (
        "chunkkv", lambda model: CustomPolicy(chunkkv(W=8, N_reuse=2), 0.3), "layers or heads token by token",
    ),
    "sums of another policy": ("tova", lambda model: method("h2o"), "h2o continues only caches made by h2o"),
    "no sums at all": ("adakv", lambda model: method("h2o"), "h2o continues only caches made by h2o"),
}


@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", REFUSED_TURNS)
def test_a_turn_that_cannot_be_decided_is_named_and_changes_nothing(name: str) -> None:
    before, after, words = REFUSED_TURNS[name]
    model = build("llama")
    _, cache = read_prompt(model, method(before))
    kept = live_sets(cache)
    with after(model)(model), torch.no_grad(), pytest.raises(SpecError, match=words):
        model(input_ids=prompt(NEW), past_key_values=cache)
    assert live_sets(cache) == kept
    assert cache.get_seq_length() == PROMPT


def of_another_policy(cache: RetainedCache) -> RetainedCache:
    return read_prompt(build("llama"), method("tova"))[1]


def grown_elsewhere(cache: RetainedCache) -> RetainedCache:
    model = build("llama")
    with observing(describe(model), cache), torch.no_grad():
        model(input_ids=prompt(1), past_key_values=cache)
    return cache


def cropped(cache: RetainedCache) -> RetainedCache:
    cache.crop(-1)
    return cache


@pytest.mark.parametrize("spoil", [of_another_policy, grown_elsewhere, cropped])
def test_a_policy_goes_on_from_its_own_records_only(spoil: Callable[[RetainedCache], RetainedCache]) -> None:
    model = build("llama")
    cache = spoil(read_prompt(model, method("h2o"))[1])
    with method("h2o")(model), torch.no_grad(), pytest.raises(SpecError, match="tokens without records"):
        model(input_ids=prompt(1), past_key_values=cache)


def test_steps_need_equal_shares() -> None:
    chosen = CustomPolicy(with_adaptive_budgets(h2o()), parse_budget(0.3))
    with chosen(build("llama")) as run, torch.no_grad(), pytest.raises(SpecError, match="only with equal shares"):
        run._model(input_ids=prompt(PROMPT))


def test_a_window_above_the_prompt_or_a_budget_below_it() -> None:
    model = build("llama")
    run, cache = read_prompt(model, method("snapkv", 3))
    assert cache.mean_length == 8
    assert run.over_budget == 0
    with method("snapkv", 1.0)(model) as session, torch.no_grad():
        model(input_ids=prompt(5))
    assert session.cache is not None
    assert session.cache.mean_length == 5


def test_records_of_single_tokens_are_not_saved(tmp_path: Path) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method("h2o"))
    with pytest.raises(SpecError, match=r"cache = 'h2o': keeps records of single tokens, .* as snapkv, or"):
        save_cache(cache, model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [1, -70])
def test_no_more_can_be_taken_back_than_was_seen(tokens: Any) -> None:
    cache, _ = ragged()
    with pytest.raises(SpecError, match=r"tokens_to_remove"):
        cache.full_layers[0].crop(tokens)
    assert cache.get_seq_length() == PROMPT


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
    assert live_sets(cache) == before
    assert cache.get_seq_length() == PROMPT
