"""Batches of questions of different lengths on one document, and unusual continuations of caches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models_integration import RetainedCache
from models_integration.session.hooks import check_call
from spec.errors import SpecError
from tests.models_integration.session.families import build, greedy, prompt, relative
from tests.models_integration.session.sessions import method

N, NEW = 64, 5
LENGTHS = (9, 4, 6)
POLICIES = ["streamingllm", "snapkv", "adakv", "pyramidkv", "nestedkv", "kvzip", "crystalcache", "fullcache"]
"""Policies with one kept set for the model, for each layer and for each head, of equal and of different sizes."""


def document() -> Tensor:
    return prompt(N)


def batch() -> tuple[Tensor, Tensor]:
    """Return documents and questions with padding between the two, and the mask."""
    widest, rows, masks = max(LENGTHS), [], []
    for row, length in enumerate(LENGTHS):
        gap = torch.zeros(1, widest - length, dtype=torch.int64)
        rows.append(torch.cat([document(), gap, prompt(length, seed=row)], dim=1))
        masks.append(torch.cat([torch.ones(1, N, dtype=torch.int64), gap, torch.ones(1, length, dtype=torch.int64)], 1))
    return torch.cat(rows), torch.cat(masks)


def answered(model: Any, ids: Tensor, cache: RetainedCache, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the generated ids and the logits of each."""
    output = model.generate(
        input_ids=ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize(("family", "policy"), [
    *(("llama", policy) for policy in POLICIES), ("qwen3", "adakv"), ("qwen3", "crystalcache"),
])
def test_a_batch_of_questions_equals_single_questions(policy: str, family: str) -> None:
    model: Any = build(family)
    ids, mask = batch()
    logits, tokens = [], []
    for row, length in enumerate(LENGTHS):
        with method(policy)(model) as run, torch.no_grad():
            model(input_ids=document())
            assert run.cache is not None
            with run.reading():
                single = torch.cat([document(), prompt(length, seed=row)], dim=1)
                new, own = answered(model, single, run.cache)
        tokens.append(new)
        logits.append(own)
    with method(policy)(model) as run, torch.no_grad():
        model(input_ids=document())
        assert run.cache is not None
        run.cache.batch_repeat_interleave(len(LENGTHS))
        with run.reading():
            actual, ours = answered(model, ids, run.cache, attention_mask=mask)
    assert relative(ours, torch.cat(logits)) < 1e-5
    assert torch.equal(actual, torch.cat(tokens))


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("policy", ["adakv", "streamingllm"])
def test_a_second_batch_of_questions_follows_the_first(policy: str) -> None:
    model: Any = build("llama")
    ids, mask = batch()
    later, hidden = prompt(4, seed=9).expand(3, -1), torch.tensor([[1] * 4, [0] * 2 + [1] * 2, [0] + [1] * 3])
    with method(policy)(model) as run, torch.no_grad():
        model(input_ids=document())
        assert run.cache is not None
        run.cache.batch_repeat_interleave(3)
        with run.reading():
            for text, shown in ((ids[:, N:], mask), (later, torch.cat([mask, hidden], dim=1))):
                actual = model(input_ids=text, attention_mask=shown, past_key_values=run.cache).logits
    for row in range(3):
        with method(policy)(model) as run, torch.no_grad():
            model(input_ids=document())
            with run.reading():
                for text in (prompt(LENGTHS[row], seed=row), later[:1, hidden[row] == 1]):
                    single = model(input_ids=text, past_key_values=run.cache).logits
        assert relative(actual[row : row + 1, -1], single[:, -1]) < 1e-5


@pytest.mark.law("refused-before-anything-changes")
def test_padding_that_cannot_be_read_is_refused() -> None:
    model: Any = build("llama")
    ids, mask = batch()
    with method("h2o")(model) as run, torch.no_grad():
        model(input_ids=document())
        assert run.cache is not None
        run.cache.batch_repeat_interleave(3)
        with run.reading(), pytest.raises(SpecError, match="pass questions of equal length, or one at a time"):
            model(input_ids=ids[:, N:], attention_mask=mask, past_key_values=run.cache)
        assert run.seen == N
    with method("snapkv")(model) as run, torch.no_grad():
        model(input_ids=document())
        assert run.cache is not None
        run.cache.batch_repeat_interleave(3)
        with run.reading():
            with pytest.raises(SpecError, match="put the padding between the earlier text and the new text"):
                model(input_ids=ids[:, N:], attention_mask=mask.flip(1).roll(9, 1), past_key_values=run.cache)
            model(input_ids=ids[:, N:], attention_mask=mask, past_key_values=run.cache)
        with pytest.raises(SpecError, match="columns of a padded turn; at most the last 0 tokens"):
            run.cache.crop(-3)


@pytest.mark.law("a-cache-like-any-other")
def test_the_cached_text_alone_says_to_crop_a_token() -> None:
    model: Any = build("llama")
    with method("snapkv")(model) as run:
        first = greedy(model, document(), NEW)
        assert run.cache is not None
        whole = torch.cat([document(), first[:, :-1]], dim=1)
        assert whole.shape[1] == run.seen
        with pytest.raises(SpecError, match=r"are all in the cache, .*type cache.crop\(-1\) before generate"):
            greedy(model, whole, NEW, past_key_values=run.cache)
        run.cache.crop(-1)
        assert torch.equal(greedy(model, whole, 1, past_key_values=run.cache), first[:, -1:])
        with pytest.raises(SpecError, match="must begin with the 68 tokens seen"):
            greedy(model, whole[:, :-1], NEW, past_key_values=run.cache)
        changed = torch.cat([whole, prompt(9, seed=8)], dim=1)
        changed[0, 66] += 1
        with pytest.raises(SpecError, match=r"is token 66 of the text, .* type cache.crop\(-2\), pass the same"):
            greedy(model, changed, NEW, past_key_values=run.cache)
        run.cache.crop(-2)
        assert greedy(model, changed, NEW, past_key_values=run.cache).shape == (1, NEW)


@pytest.mark.law("a-cache-like-any-other")
def test_beams_of_a_prefix_say_how_to_repeat_it() -> None:
    model: Any = build("llama")
    ids = torch.cat([document(), prompt(6, seed=4)], dim=1)
    with method("streamingllm")(model) as run, torch.no_grad():
        model(input_ids=document())
        assert run.cache is not None
        with run.reading():
            with pytest.raises(SpecError, match=r"first type cache.batch_repeat_interleave\(3\)"):
                greedy(model, ids, NEW, past_key_values=run.cache, num_beams=3)
            run.cache.batch_repeat_interleave(3)
            assert greedy(model, ids, NEW, past_key_values=run.cache, num_beams=3).shape == (1, NEW)


@pytest.mark.law("as-it-is-described")
def test_dynamic_full_is_a_dynamic_cache() -> None:
    """Check names that exist only in releases before transformers 5.24."""
    for name in ("dynamic", "dynamic_full", "hybrid"):
        check_call({"cache_implementation": name})
    for name in ("static", "quantized", "offloaded"):
        with pytest.raises(SpecError, match=f"cache_implementation = '{name}'"):
            check_call({"cache_implementation": name})
