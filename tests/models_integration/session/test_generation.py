"""Generation equals generation from a masked full cache, by each name of `generate`, in threads and for questions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from threading import Event, Thread
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from models_integration import RetainedCache, RetentionPolicy, prefill
from models_integration.model.cache_argument import CACHE
from models_integration.session.hooks import check_call
from spec.errors import SpecError
from tests.models_integration.session.families import METHODS, at_once, build, greedy, prompt, relative, step_by_step
from tests.models_integration.session.sessions import breathing, live_sets, method

pytestmark = pytest.mark.law("eviction-equals-masking")

N, NEW = 64, 6


def by_decoder(model: Any) -> tuple[Any, Callable[..., Tensor]]:
    return model.model, model.generate


def bound_before(model: Any) -> tuple[Any, Callable[..., Tensor]]:
    return model, model.generate


def by_type(model: Any) -> tuple[Any, Callable[..., Tensor]]:
    return model, lambda *args, **kwargs: type(model).generate(model, *args, **kwargs)


names = pytest.mark.parametrize("name", [by_decoder, bound_before, by_type])


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}, {"num_beams": 2}])
@pytest.mark.parametrize("name", [by_decoder, bound_before, by_type])
def test_the_cache_that_generate_made_is_left_as_it_was(name: Callable[..., Any], options: dict[str, Any]) -> None:
    """Check that later forward passes of the call use the session's cache, which generate also returns."""
    model, caches = build("llama"), list[Any]()
    given, generate = name(model)
    with (
        METHODS["crystalcache"]()(given) as run,
        model.register_forward_pre_hook(lambda _, args, kwargs: caches.append(kwargs[CACHE]), with_kwargs=True),
    ):
        output: Any = generate(
            prompt(N), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, eos_token_id=None, **options
        )
    created, *later = caches
    assert (type(created), created.get_seq_length()) == (DynamicCache, 0)
    assert all(cache is run.cache for cache in [*later, output[CACHE]])
    assert run.stored < run.seen == N + NEW - 1


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("name", "options", "words"), [
    (by_decoder, {"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens = 4: must be left out: assisted decoding"),
    (bound_before, {"cache_implementation": "static"}, "cache_implementation = 'static'"),
    (by_type, {"use_cache": False}, "use_cache = False"),
])
def test_every_name_of_generate_refuses(name: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    model = build("llama")
    given, generate = name(model)
    with METHODS["crystalcache"]()(given) as run:
        with pytest.raises(SpecError, match=words):
            generate(prompt(N), max_new_tokens=NEW, do_sample=False, **options)
        assert run.cache is None
        generate(prompt(N), max_new_tokens=2, do_sample=False)
        assert run.kept is not None


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize(("name", "options"), [
    (by_decoder, {"prefill_chunk_size": 20}), (by_decoder, {"num_return_sequences": 3, "num_beams": 3}),
    (bound_before, {"num_return_sequences": 3, "num_beams": 3}), (by_type, {"prefill_chunk_size": 20}),
])
def test_every_name_of_generate_is_served_as_the_first(name: Callable[..., Any], options: dict[str, Any]) -> None:
    """Chunks are one prompt. Rows that repeat a prompt are also one prompt."""
    actual = []
    for way in (lambda model: (model, None), name):
        model: Any = build("llama")
        given, generate = way(model)
        with METHODS["crystalcache"]()(given) as run:
            output = (generate or model.generate)(prompt(N), max_new_tokens=NEW, do_sample=False, **options)
        assert run.kept is not None
        actual.append((output.tolist(), run.kept.tolist()))
    assert actual[0] == actual[1]


@names
@pytest.mark.law("unusable-after-a-failure")
def test_a_prompt_that_generate_leaves_half_way_is_given_up(name: Callable[..., Any]) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    given, generate = name(model)
    calls: list[int] = []

    def second(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("boom")

    hook = model.register_forward_pre_hook(second)
    with METHODS["crystalcache"]()(given) as run:
        with hook, pytest.raises(RuntimeError, match="boom"):
            generate(prompt(N), max_new_tokens=2, prefill_chunk_size=16, past_key_values=cache)
        at_once(model, prompt(N), RetainedCache(model.config))
        assert run.kept is not None
        with pytest.raises(SpecError, match="a prompt was not finished"):
            cache.get_seq_length()


def question(
    model: PreTrainedModel, policy: RetentionPolicy, new: int, *, by_hand: bool, **options: int,
) -> tuple[list[int], Any]:
    """Return the answer to a question after a context, and the stored positions at the end."""
    context, asked = prompt(N), prompt(5, seed=11)
    with policy(model) as run:
        cache = RetainedCache(model.config)
        at_once(model, context, cache)
        if by_hand:
            with run.reading():
                token = at_once(model, asked, cache)[:, -1:].argmax(-1)
            chosen = [int(token)]
            while len(chosen) < new:
                token = at_once(model, token, cache)[:, -1:].argmax(-1)
                chosen.append(int(token))
        else:
            with run.reading():
                whole = torch.cat([context, asked], dim=1)
                chosen = greedy(model, whole, new, past_key_values=cache, **options)[0].tolist()
        return chosen, live_sets(cache)


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("policy", [
    METHODS["crystalcache"], lambda: method("kvzip"), lambda: method("h2o"), lambda: breathing(30, decode=True),
], ids=["crystalcache", "kvzip", "h2o", "decode"])
def test_a_question_behind_a_context_is_one_call(policy: Callable[[], RetentionPolicy]) -> None:
    """Check that the question evicts no token and that generated tokens are steps, as in a loop by hand."""
    model = build("llama")
    expected = question(model, policy(), 12, by_hand=True)
    assert question(model, policy(), 12, by_hand=False) == expected
    assert question(model, policy(), 12, by_hand=False, prefill_chunk_size=4) == expected


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("inside", "name"), [(True, "snapkv"), (False, "crystalcache")])
def test_a_text_that_the_cache_has_not_read_is_refused(inside: bool, name: str) -> None:
    """Check that the cache still accepts the text that it has read, including generated tokens."""
    model = build("llama")
    with method(name)(model) as run:
        first = model.generate(prompt(N), max_new_tokens=4, do_sample=False)  # type: ignore[operator]
        if inside:
            refused(model, run.cache, first)
    if not inside:
        assert run.cache is not None
        refused(model, run.cache, first)


def refused(model: PreTrainedModel, cache: Any, first: Tensor) -> None:
    text, stored = torch.cat([first, prompt(5, seed=9)], dim=1), live_sets(cache)
    for at, name in product((0, N // 2, N + 2), sorted({"past_key_values", CACHE})):
        edited = text.clone()
        edited[0, at] = 3 + (edited[0, at] + 1) % 90
        wrong, right = int(edited[0, at]), int(text[0, at])
        words = f"input_ids = {wrong}: is token {at} of the text, but the cache has seen the token {right}"
        with pytest.raises(SpecError, match=words):
            greedy(model, edited, 2, **{name: cache})
    with pytest.raises(SpecError, match=f"input_ids = '20 tokens': must begin with the {N + 3} tokens"):
        greedy(model, text[:, :20], 2, past_key_values=cache)
    assert live_sets(cache) == stored
    assert greedy(model, text, 2, **{CACHE: cache}).shape == (1, 2)


@pytest.mark.law("a-cache-like-any-other")
def test_a_text_is_compared_as_far_as_its_ids_are_known() -> None:
    """Check padding, reordered rows, removed tokens, and tokens that were read outside `generate`."""
    model = build("llama")
    rows = torch.cat([prompt(N), prompt(N, seed=8)])
    mask = torch.ones_like(rows)
    mask[1, :7] = 0
    with METHODS["crystalcache"]()(model) as run, torch.no_grad():
        model(input_ids=rows, attention_mask=mask)
        assert run.cache is not None
        run.cache.reorder_cache(torch.tensor([1, 0]))
        whole = torch.cat([rows.flip(0), prompt(6, seed=9).view(2, 3)], dim=1)
        whole[0, :7] = 5
        grown = torch.cat([mask.flip(0), torch.ones(2, 3, dtype=torch.int64)], dim=1)
        assert greedy(model, whole, 2, past_key_values=run.cache, attention_mask=grown).shape == (2, 2)
    cache, ids = prefill(model, METHODS["crystalcache"](), prompt(N)).cache, prompt(N)
    step_by_step(model, prompt(2, seed=4), cache)
    text = torch.cat([ids, prompt(5, seed=5)], dim=1)
    assert greedy(model, text, 1, past_key_values=cache).shape == (1, 1)
    cache.crop(-10)
    text[0, cache.get_seq_length() :] = 7
    assert greedy(model, text, 1, past_key_values=cache).shape == (1, 1)


class Gate:
    """Logits processor that waits at the first token of generate until it may continue."""

    def __init__(self) -> None:
        self.reached, self.go = Event(), Event()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.reached.set()
        assert self.go.wait(60)
        return scores


def in_a_thread(generate: Callable[..., Any], gate: Gate | None, start: bool = True) -> tuple[Thread, list[Any]]:
    actual: list[Any] = []
    processors = LogitsProcessorList([] if gate is None else [gate])

    def run() -> None:
        try:
            actual.append(generate(prompt(N), max_new_tokens=12, do_sample=False, logits_processor=processors))
        except SpecError as error:
            actual.append(error)

    thread = Thread(target=run, daemon=True)
    if start:
        thread.start()
    return thread, actual


THREADED: dict[str, Callable[[], RetentionPolicy]] = {
    "crystalcache": METHODS["crystalcache"], "snapkv": lambda: method("snapkv"),
    "decode": lambda: breathing(30, decode=True),
}


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize(
    ("name", "when"), [("crystalcache", "not yet begun"), ("snapkv", "running"), ("decode", "running")],
)
def test_a_thread_that_outlives_the_block_generates_under_the_policy(name: str, when: str) -> None:
    model: Any = build("llama")
    with THREADED[name]()(model) as expected:
        tokens = model.generate(prompt(N), max_new_tokens=12, do_sample=False)
    gate = Gate()
    with THREADED[name]()(model) as run:
        thread, actual = in_a_thread(model.generate, gate, start=when == "running")
        if when == "running":
            assert gate.reached.wait(60)
    if when == "not yet begun":
        assert not model.model._forward_pre_hooks
        thread.start()
        assert gate.reached.wait(60)
    assert "generate" not in vars(model)
    with pytest.raises(SpecError, match="another thread runs generate on the model"):
        at_once(model, prompt(5), RetainedCache(model.config))
    with pytest.raises(SpecError, match="is already inside `with policy"), METHODS["fullcache"]()(model):
        raise AssertionError
    gate.go.set()
    thread.join(60)
    assert torch.equal(actual[0], tokens)
    assert live_sets(run.cache) == live_sets(expected.cache)
    assert not model.model._forward_pre_hooks
    assert greedy(model, prompt(N), 2).shape == (1, 2)


@pytest.mark.law("refused-before-anything-changes")
def test_a_thread_that_the_policy_would_lose_is_named() -> None:
    """Check a policy on the decoder. It has no access to the outer `generate`, but detects that `generate` runs."""
    model, gate = cast(Any, build("llama")), Gate()
    with pytest.raises(SpecError, match="generate = 'still running'"), METHODS["crystalcache"]()(model.model):
        thread, _ = in_a_thread(model.generate, gate)
        assert gate.reached.wait(60)
    with pytest.raises(SpecError, match="another thread runs generate on the model"), METHODS["fullcache"]()(model):
        raise AssertionError
    gate.go.set()
    thread.join(60)
    assert not model.model._forward_pre_hooks


@pytest.mark.law("parts-equal-the-whole")
def test_threads_take_turns() -> None:
    model, gate = cast(Any, build("llama")), Gate()
    with METHODS["crystalcache"]()(model):
        expected = model.generate(prompt(N), max_new_tokens=12, do_sample=False)
        first, actual = in_a_thread(model.generate, gate)
        assert gate.reached.wait(60)
        second, others = in_a_thread(model.generate, None)
        gate.go.set()
        first.join(60)
        second.join(60)
    assert torch.equal(actual[0], expected)
    assert torch.equal(others[0], expected)


@pytest.mark.law("refused-before-anything-changes")
def test_a_generate_that_was_taken_inside_is_refused_after_the_block() -> None:
    model = build("llama")
    with METHODS["crystalcache"]()(model):
        taken = model.generate
    ended = "the `with` block of this function has ended"
    with pytest.raises(SpecError, match=f"generate = 'taken inside a context': {ended}"):
        taken(prompt(N), max_new_tokens=2)  # type: ignore[operator]


ANSWER = 5
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


@contextmanager
def after_document(policy: str, family: str = "llama", repeats: int = 1) -> Iterator[tuple[Any, Any]]:
    """Yield a model, and a session that has read the document. Its cache has `repeats` rows."""
    model: Any = build(family)
    with method(policy)(model) as run, torch.no_grad():
        model(input_ids=document())
        assert run.cache is not None
        run.cache.batch_repeat_interleave(repeats)
        yield model, run


def answered(model: Any, ids: Tensor, cache: RetainedCache, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the generated ids and the logits of each."""
    output = model.generate(
        input_ids=ids, past_key_values=cache, max_new_tokens=ANSWER, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize(("family", "policy"), [
    *(("llama", policy) for policy in POLICIES), ("qwen3", "adakv"), ("qwen3", "crystalcache"),
])
def test_a_batch_of_questions_equals_single_questions(policy: str, family: str) -> None:
    (ids, mask), singles = batch(), []
    for row, length in enumerate(LENGTHS):
        with after_document(policy, family) as (model, run), run.reading():
            singles.append(answered(model, torch.cat([document(), prompt(length, seed=row)], dim=1), run.cache))
    with after_document(policy, family, len(LENGTHS)) as (model, run), run.reading():
        actual, logits = answered(model, ids, run.cache, attention_mask=mask)
    assert relative(logits, torch.cat([single for _, single in singles])) < 1e-5
    assert torch.equal(actual, torch.cat([new for new, _ in singles]))


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("policy", ["adakv", "streamingllm"])
def test_a_second_batch_of_questions_follows_the_first(policy: str) -> None:
    ids, mask = batch()
    later, hidden = prompt(4, seed=9).expand(3, -1), torch.tensor([[1] * 4, [0] * 2 + [1] * 2, [0] + [1] * 3])
    with after_document(policy, repeats=3) as (model, run), run.reading():
        for text, shown in ((ids[:, N:], mask), (later, torch.cat([mask, hidden], dim=1))):
            actual = model(input_ids=text, attention_mask=shown, past_key_values=run.cache).logits
    for row in range(3):
        with after_document(policy) as (model, run), run.reading():
            for text in (prompt(LENGTHS[row], seed=row), later[:1, hidden[row] == 1]):
                single = model(input_ids=text, past_key_values=run.cache).logits
        assert relative(actual[row : row + 1, -1], single[:, -1]) < 1e-5


@pytest.mark.law("refused-before-anything-changes")
def test_padding_that_cannot_be_read_is_refused() -> None:
    ids, mask = batch()
    with after_document("h2o", repeats=3) as (model, run):
        with run.reading(), pytest.raises(SpecError, match="pass questions of equal length, or one at a time"):
            model(input_ids=ids[:, N:], attention_mask=mask, past_key_values=run.cache)
        assert run.seen == N
    with after_document("snapkv", repeats=3) as (model, run):
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
        first = greedy(model, document(), ANSWER)
        assert run.cache is not None
        whole = torch.cat([document(), first[:, :-1]], dim=1)
        assert whole.shape[1] == run.seen
        with pytest.raises(SpecError, match=r"are all in the cache, .*type cache.crop\(-1\) before generate"):
            greedy(model, whole, ANSWER, past_key_values=run.cache)
        run.cache.crop(-1)
        assert torch.equal(greedy(model, whole, 1, past_key_values=run.cache), first[:, -1:])
        with pytest.raises(SpecError, match="must begin with the 68 tokens seen"):
            greedy(model, whole[:, :-1], ANSWER, past_key_values=run.cache)
        changed = torch.cat([whole, prompt(9, seed=8)], dim=1)
        changed[0, 66] += 1
        with pytest.raises(SpecError, match=r"is token 66 of the text, .* type cache.crop\(-2\), pass the same"):
            greedy(model, changed, ANSWER, past_key_values=run.cache)
        run.cache.crop(-2)
        assert greedy(model, changed, ANSWER, past_key_values=run.cache).shape == (1, ANSWER)


@pytest.mark.law("a-cache-like-any-other")
def test_beams_of_a_prefix_say_how_to_repeat_it() -> None:
    ids = torch.cat([document(), prompt(6, seed=4)], dim=1)
    with after_document("streamingllm") as (model, run), run.reading():
        with pytest.raises(SpecError, match=r"first type cache.batch_repeat_interleave\(3\)"):
            greedy(model, ids, ANSWER, past_key_values=run.cache, num_beams=3)
        run.cache.batch_repeat_interleave(3)
        assert greedy(model, ids, ANSWER, past_key_values=run.cache, num_beams=3).shape == (1, ANSWER)


@pytest.mark.law("as-it-is-described")
def test_dynamic_full_is_a_dynamic_cache() -> None:
    """Check names that exist only in releases before transformers 5.24."""
    for name in ("dynamic", "dynamic_full", "hybrid"):
        check_call({"cache_implementation": name})
    for name in ("static", "quantized", "offloaded"):
        with pytest.raises(SpecError, match=f"cache_implementation = '{name}'"):
            check_call({"cache_implementation": name})
