"""Masks and positions that are passed to a forward pass are checked against the positions of the cache."""

import copy
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from models_integration import CrystalCache, RetainedCache, RetentionPolicy, prefill
from models_integration.archive.layer_masks import layer_masks
from models_integration.attention.cached_attention import retained_mask
from models_integration.cache.positions import EMPTY, SlotOffset, StoredRows
from models_integration.model.cache_argument import CACHE, NAMES, cache_name
from models_integration.model.rotation import prefilled
from models_integration.session.verbs import read
from spec.errors import SpecError
from spec.parameters import TINY
from tests.models_integration.session.families import ENDS, METHODS, VOCABULARY, build, prompt
from tests.models_integration.session.sessions import live_sets, method, read_prompt

pytestmark = pytest.mark.law("refused-before-anything-changes")


N = 40
POLICIES: dict[str, Callable[[], RetentionPolicy]] = {
    "one set": METHODS["crystalcache"],
    "a set for each layer": lambda: method("chunkkv"),
    "a set for each head": lambda: method("adakv"),
    "decisions in steps": lambda: method("h2o"),
    "breaths": lambda: CrystalCache(16, ENDS, TINY, backend="numpy", decode=True),
}


def ones(width: int) -> Tensor:
    return torch.ones(1, width, dtype=torch.int64)


def hiding(position: int) -> Tensor:
    mask = ones(N + 1)
    mask[0, position] = 0
    return mask


# Arguments in addition to one token, and the words of the error.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a mask over the stored slots": ({"attention_mask": ones(12)}, rf"attention_mask = \(1, 12\).*\(1, {N + 1}\)"),
    "a mask without the new token": ({"attention_mask": ones(N)}, rf"attention_mask = \(1, {N}\)"),
    "a mask that is too wide": ({"attention_mask": ones(N + 2)}, rf"attention_mask = \(1, {N + 2}\)"),
    "a mask of the new token alone": ({"attention_mask": ones(1)}, r"attention_mask = \(1, 1\)"),
    "a mask that hides a token seen": ({"attention_mask": hiding(3)}, r"attention_mask = \[1\]: must have the padding"),
    "a mask that hides the new token": ({"attention_mask": hiding(N)}, "attention_mask = 'zeros'"),
    "a mask of other numbers": ({"attention_mask": 2 * ones(N + 1)}, "must have only zeros and ones"),
    "a 4D mask": ({"attention_mask": torch.ones(1, 1, 1, N + 1, dtype=torch.bool)}, r"attention_mask = \(1, 1, 1, "),
    "masks per layer type": ({"attention_mask": {"full_attention": None}}, "attention_mask = 'dict'"),
    "a position that counts slots": (
        {"position_ids": torch.tensor([[12]])}, rf"position_ids = '12 to 12': must be {N} to {N}",
    ),
    "a position before": ({"position_ids": torch.tensor([[N - 1]])}, "position_ids"),
    "a position after": ({"position_ids": torch.tensor([[N + 1]])}, "position_ids"),
    "too many positions": ({"position_ids": torch.tensor([[N, N + 1]])}, r"position_ids = \(1, 2\)"),
    "positions of three axes": ({"position_ids": torch.full((3, 1, 1), N)}, "position_ids"),
    "an id past the vocabulary": ({"input_ids": torch.tensor([[VOCABULARY]])}, f"input_ids = {VOCABULARY}"),
    "attention to what follows": ({"is_causal": False}, "is_causal = False"),
}

RIGHT: dict[str, Any] = {"attention_mask": ones(N + 1), "position_ids": torch.tensor([[N]])}
WRONG_FOR_A_BLOCK: dict[str, tuple[dict[str, Any], str]] = {
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.ones(1, 1, 48)}, "inputs_embeds = 'given'"),
    "a cache that is not used": ({"use_cache": False}, "use_cache = False"),
    "no cache": ({"past_key_values": None}, "past_key_values = 'NoneType': must be the cache that layer_masks"),
    "another cache": ({"past_key_values": DynamicCache()}, "past_key_values = 'DynamicCache'"),
}


def logits_with(model: PreTrainedModel, cache: RetainedCache, **given: Any) -> Tensor:
    """Return the logits of a token, or of the given ids."""
    with torch.no_grad():
        logits = model(**{"input_ids": torch.tensor([[7]]), "past_key_values": cache, **given}).logits
    assert isinstance(logits, Tensor)
    return logits


def check_refused(model: PreTrainedModel, cache: RetainedCache, given: dict[str, Any], words: str) -> None:
    """Check that wrong arguments raise an error and that the cache is unchanged."""
    before = live_sets(cache)
    with pytest.raises(SpecError, match=words):
        logits_with(model, cache, **given)
    assert live_sets(cache) == before
    assert cache.get_seq_length() == N


@pytest.mark.parametrize(("policy", "reading"), [
    *((policy, bool(at % 2)) for at, policy in enumerate(POLICIES)), ("one set", True), ("a set for each layer", False),
])
def test_what_does_not_continue_is_refused_and_changes_nothing(policy: str, reading: bool) -> None:
    """Check each mistake in turn. Then the right token gives the logits of an untouched cache."""
    model = build("llama")
    with POLICIES[policy]()(model) as run:
        logits_with(model, RetainedCache(model.config), input_ids=prompt(N))
        assert run.cache is not None
        untouched = copy.deepcopy(run.cache)
        with run.reading() if reading else nullcontext():
            expected = logits_with(model, untouched)
            for given, words in WRONG.values():
                check_refused(model, run.cache, given, words)
            assert torch.equal(logits_with(model, run.cache, **RIGHT), expected)


@pytest.mark.parametrize("policy", ["one set", "a set for each layer", "a set for each head"])
def test_a_cache_read_through_layer_masks_is_told_the_same(policy: str) -> None:
    """Check a cache outside any context, with layer masks."""
    model = build("llama")
    _, cache = read_prompt(model, POLICIES[policy](), N)
    untouched = copy.deepcopy(cache)
    with layer_masks(model, untouched):
        expected = logits_with(model, untouched)
    with layer_masks(model, cache):
        for given, words in (WRONG | WRONG_FOR_A_BLOCK).values():
            check_refused(model, cache, given, words)
        assert torch.equal(logits_with(model, cache, **RIGHT), expected)
    assert not model.get_decoder()._forward_pre_hooks  # type: ignore[no-untyped-call]


def padded_batch(policy: str) -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache of two rows. The second row has five columns of padding."""
    model, mask = build("llama"), torch.ones(2, N, dtype=torch.int64)
    mask[1, :5] = 0
    with POLICIES[policy]()(model) as run:
        logits_with(model, RetainedCache(model.config), input_ids=prompt(2 * N).view(2, N), attention_mask=mask)
    assert run.cache is not None
    return model, run.cache


@pytest.mark.parametrize("policy", ["one set", "a set for each layer"])
def test_rows_that_differ_have_no_mask_by_layer(policy: str) -> None:
    model, cache = padded_batch(policy)
    with pytest.raises(SpecError, match="past_key_values = 'rows that differ'"), layer_masks(model, cache):
        pass
    assert not model.get_decoder()._forward_pre_hooks  # type: ignore[no-untyped-call]


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize(("policy", "masks"), [
    ("one set", False), ("a set for each head", False), ("a set for each head", True),
])
def test_padded_rows_have_padding_and_positions_of_their_own(policy: str, masks: bool) -> None:
    """Check the padding and a separate position of each row, in the context. Layer masks add omitted positions."""
    model, cache = padded_batch(policy)
    following, step = torch.ones(2, N + 1, dtype=torch.int64), {"input_ids": torch.tensor([[7], [8]])}
    following[1, :5] = 0
    wrong = [{"position_ids": torch.tensor([[N], [N]])}, {"attention_mask": torch.ones_like(following)}]
    right = {"attention_mask": following, "position_ids": torch.tensor([[N], [N - 5]])}
    with POLICIES[policy]()(model):
        expected = logits_with(model, copy.deepcopy(cache), **step)
    with layer_masks(model, cache) if masks else POLICIES[policy]()(model):
        for given in wrong[:1] if masks else wrong:
            with pytest.raises(SpecError, match=r"attention_mask = \[0, 0\]|position_ids = .40 to 40.: must be 35 to"):
                logits_with(model, cache, **step, **given)
        assert torch.equal(logits_with(model, cache, **step, **({} if masks else right)), expected)


def test_a_stream_s_step_is_checked_before_its_segment_ends() -> None:
    model = build("llama")
    with CrystalCache(16, ENDS, TINY, backend="numpy", decode=True, stream=True)(model) as run:
        cache = RetainedCache(model.config)
        logits_with(model, cache, input_ids=prompt(N))
        seen, before = run.retentions, live_sets(cache)
        with pytest.raises(SpecError, match="attention_mask"):
            logits_with(model, cache, attention_mask=ones(N))
        assert run.retentions is seen
        assert live_sets(cache) == before
        logits_with(model, cache, attention_mask=ones(N + 1))
        assert cache.get_seq_length() == N + 1


BLOCKS: dict[str, Callable[..., Any]] = {
    "a context": lambda model, cache: METHODS["crystalcache"]()(model), "layer_masks": layer_masks,
}


def evicted() -> tuple[Any, RetainedCache]:
    """Return a model and a cache of N tokens after an eviction."""
    model = build("llama")
    return model, prefill(model, METHODS["crystalcache"](), prompt(N)).cache


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("inside", BLOCKS)
def test_a_forward_takes_its_cache_by_each_of_its_names(inside: str) -> None:
    """Check the forward pass of the model and of its decoder."""
    model, cache = evicted()
    logits = []
    for name in NAMES:
        given = {name: copy.deepcopy(cache)}
        with BLOCKS[inside](model, given[name]), torch.no_grad():
            logits.append(model(torch.tensor([[7]]), **given).logits)
            model.base_model(torch.tensor([[8]]), **given)
        assert given[name].get_seq_length() == N + 2
    assert torch.equal(*logits)


class Older(torch.nn.Module):
    """Model whose file was written for an older release of transformers."""

    def forward(self, input_ids: Tensor, past_key_values: object = None, **others: object) -> None: ...


class Wrapper(torch.nn.Module):
    def forward(self, *args: object, **kwargs: object) -> None: ...


@pytest.mark.law("as-it-is-described")
def test_a_model_is_given_its_cache_by_the_name_that_its_forward_has() -> None:
    actual = [cache_name(model) for model in (Older(), Wrapper(), build("llama"))]
    assert actual == ["past_key_values", CACHE, CACHE]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inside", BLOCKS)
def test_another_cache_is_refused_by_each_name(name: str, inside: str) -> None:
    """Check a wrong cache alone and together with the right cache. transformers would read only one of the two."""
    (model, cache), ids = evicted(), torch.tensor([[7]])
    foreign = DynamicCache() if inside == "layer_masks" else StaticCache(model.config, max_cache_len=N)
    before = live_sets(cache)
    with BLOCKS[inside](model, cache), torch.no_grad():
        with pytest.raises(SpecError, match=f"past_key_values = '{type(foreign).__name__}'"):
            model(ids, **{name: foreign})
        with pytest.raises(SpecError, match=r"cache = .*: pass only one of the two arguments"):
            model.base_model(ids, **{**dict.fromkeys(NAMES, cache), name: foreign})
    assert live_sets(cache) == before


@pytest.mark.law("as-it-is-described")
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("policy", ["one set", "a rehearsal", "a stream"])
def test_no_name_that_transformers_deprecates_is_used(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check warnings and the log. transformers logs some deprecations once per process."""
    def warn(logger: logging.Logger, message: str, *args: object) -> None:
        assert "deprecated" not in message, message

    monkeypatch.setattr(logging.Logger, "warning_once", warn)
    stream = CrystalCache(16, ENDS, TINY, backend="numpy", decode=True, stream=True)
    given = {"one set": METHODS["crystalcache"](), "a rehearsal": method("kvzip"), "a stream": stream}[policy]
    model, cache = evicted()
    read(model, cache, prompt(3))
    prefilled(model, [3, 4, 5])
    with given(model) as run, torch.no_grad():
        text = model.generate(prompt(N), max_new_tokens=2, do_sample=False)
        model.generate(text, past_key_values=run.cache, max_new_tokens=2, do_sample=False)
        model(torch.tensor([[7]]), **{CACHE: run.cache})


@pytest.mark.law("a-cache-like-any-other")
def test_a_single_decode_step_needs_no_mask() -> None:
    rows = StoredRows(torch.tensor([[0, 3, 7]]), torch.tensor([9]))
    mask = retained_mask(sdpa_mask)(
        batch_size=1, q_length=1, kv_length=5, q_offset=10, kv_offset=SlotOffset(6, rows), allow_is_causal_skip=True
    )
    assert mask is None


@pytest.mark.law("a-cache-like-any-other")
def test_a_window_counts_positions_and_not_slots() -> None:
    """Check a mask for slots with the positions 0, 3, 7, 9 and 10. The queries are the last two slots."""
    mask = retained_mask(sdpa_mask)(
        batch_size=1, q_length=2, kv_length=5, q_offset=9, local_size=3, allow_is_causal_skip=True,
        kv_offset=SlotOffset(6, StoredRows(torch.tensor([[0, 3, 7]]), torch.tensor([9]))),
        mask_function=sliding_window_causal_mask_function(3),
    )
    assert mask is not None
    assert mask[0, 0].tolist() == [[False, False, True, True, False], [False, False, False, True, True]]


@pytest.mark.law("a-cache-like-any-other")
def test_the_offset_added_to_slot_numbers_gives_positions() -> None:
    offset = SlotOffset(6, StoredRows(torch.tensor([[0, 3, 7]]), torch.tensor([9])))
    assert (torch.arange(5) + offset).tolist() == [0, 3, 7, 9, 10]
    assert offset + 1 == 7


@pytest.mark.law("refused-before-anything-changes")
def test_the_offset_of_differing_rows_is_refused_outside_the_context() -> None:
    offset = SlotOffset(6, StoredRows(torch.tensor([[0, 3], [EMPTY, 2]]), torch.tensor([9, 4])))
    with pytest.raises(SpecError, match="can be used only inside `with policy"):
        torch.arange(3) + offset
    with pytest.raises(SpecError, match="not used in"):
        torch.arange(3) * offset


@pytest.mark.law("parts-equal-the-whole")
def test_rows_that_share_a_hole_keep_other_tokens_without_a_warning() -> None:
    """Check tokens in columns 0, 1, 3 and 4 of five. For p >= 2, position p is in column p + 1."""
    one = StoredRows.none().grown(2, torch.tensor([[False, True, True]]))
    two = one.compacted(torch.tensor([[0, 2], [1, 3]]), torch.tensor([4]))
    assert one.columns(torch.tensor([[0, 1, 2, 3]]), 5, torch.tensor([4])).tolist() == [[0, 1, 3, 4]]
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            columns = two.columns(torch.tensor([[0, 2], [1, 3]]), 5, torch.tensor([4, 4]))
    finally:
        torch.set_warn_always(before)
    assert columns.tolist() == [[0, 3], [1, 4]]
