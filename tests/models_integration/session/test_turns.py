"""Turns, prompts in pieces, `reading()`, decode-time eviction during generation, and streams of segments."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models_integration import CrystalCache, CustomPolicy, RetainedCache, Session, StreamingLLM, policy_from_name
from models_integration.cache.continuation import Pending
from reference.crystalcache.breath import decay
from reference.policies import h2o, rkv, tova
from spec.backend import Backend, resolve
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import TINY
from spec.policy import Needs
from spec.records import CrystalRetention
from tests.models_integration.session.families import (
    _GQA,
    ENDS,
    METHODS,
    at_once,
    build,
    greedy,
    prepared,
    prompt,
    relative,
    states_of,
    step_by_step,
)
from tests.models_integration.session.masked import Masked
from tests.models_integration.session.sessions import (
    LENGTHS,
    PROMPT,
    SHORT,
    TURN,
    Looking,
    Observed,
    T,
    batch,
    breathing,
    check_states,
    live_sets,
    method_of,
    now,
    prompts,
    read_prompt,
    sets,
    tokens,
    turn,
)

pytestmark = pytest.mark.law("parts-equal-the-whole")

N, NEW = 64, 6


def test_a_batch_has_one_retention_for_each_prompt() -> None:
    model = build("llama")
    ids, mask = batch(prompts())
    with METHODS["streamingllm"]()(model) as run:
        greedy(model, ids, 2, attention_mask=mask)
        assert [one.seen for one in run.retentions] == list(LENGTHS)
        with pytest.raises(SpecError, match="kept = '3 prompts': each prompt of a batch has a separate set"):
            run.kept  # noqa: B018
        greedy(model, prompt(40), 2)
        assert len(run.retentions) == 1
        assert run.kept is not None


def test_beams_of_a_batch_stay_with_their_prompt() -> None:
    """Check three beams of each of two prompts: two retentions, and the same beams as for each prompt alone."""
    model, rows = build("llama"), prompts()[:2]
    ids, mask = batch(rows)
    options = {"num_beams": 3, "num_return_sequences": 3}
    with METHODS["crystalcache"]()(model) as run:
        together = greedy(model, ids, NEW, attention_mask=mask, **options)
    actual = sets(run)
    for row, row_tokens in enumerate(rows):
        with METHODS["crystalcache"]()(model) as single:
            expected = greedy(model, row_tokens, NEW, **options)
        assert single.kept is not None
        assert actual[row] == single.kept.tolist()
        assert together[3 * row : 3 * row + 3].tolist() == expected.tolist()


def test_rows_that_agree_are_stored_as_one() -> None:
    model = build("llama")
    cache = RetainedCache(model.config)
    with METHODS["streamingllm"]()(model):
        at_once(model, torch.cat([prompt(50, seed=1), prompt(50, seed=2)]), cache)
    assert cache.full_layers[0].rows.shared


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize(("budget", "which"), [(0.5, 0), (30, 0), (0.5, 1), (30, -1), (0.5, -2)])
def test_the_kept_sets_are_those_of_the_reference(budget: float | int, which: int) -> None:
    """Compare kept sets after a prompt, steps, a turn, steps, and a turn."""
    policy = CrystalCache(budget, ENDS, replace(TINY, observed_layer=which), backend="numpy")
    check_states(policy, [[text] for text in (prompt(N), turn(1, 1), turn(2, 1), turn(3), turn(4, 1), turn(5, 7))])


def test_a_block_of_one_token_is_a_step() -> None:
    model, kept = build("llama"), []
    for block in (True, False):
        cache = RetainedCache(model.config)
        with METHODS["crystalcache"]()(model) as run:
            at_once(model, prompt(N), cache)
            if block:
                with run.prompt():
                    at_once(model, turn(1, 1), cache)
            else:
                at_once(model, turn(1, 1), cache)
            assert states_of(cache).pending_tokens == 1
            at_once(model, turn(2), cache)
        kept.append(cache.stored_positions().tolist())
    assert kept[0] == kept[1]


def hiding(columns: slice) -> dict[str, Tensor]:
    """Return a turn of two rows, and a mask that hides these columns of the second row."""
    mask = torch.ones(2, N + TURN, dtype=torch.int64)
    mask[1, columns] = 0
    return {"input_ids": torch.cat([turn(1), turn(2)]), "attention_mask": mask}


SEEN = torch.arange(N + TURN)[None]
# Family, rows of the cache, arguments of a turn, words of the error.
WRONG: list[tuple[str, int, dict[str, Tensor], str]] = [
    ("llama", 1, {"attention_mask": (SEEN != N + TURN - 1).long()}, "right padding is not supported"),
    ("llama", 1, {"attention_mask": (SEEN > 3).long()}, "of the earlier prompt, .* pass attention_mask"),
    ("llama", 1, {"attention_mask": torch.ones(1, TURN, dtype=torch.int64)}, "must have a column for each token"),
    ("llama", 1, {"position_ids": torch.arange(32, 44)[None]}, "must be 64 to 75, because the tokens follow"),
    ("llama", 1, {"input_ids": torch.cat([turn(1), turn(2)])}, "must have 1 row, like the cache"),
    ("llama", 1, {"input_ids": torch.full((1, TURN), 999)}, "input_ids = 999"),
    ("llama", 2, hiding(slice(N, N + TURN - 1)), "1 tokens.: .* a single token is a decode step"),
    ("llama", 2, hiding(slice(N, N + TURN)), "0 tokens.: .* a single token is a decode step"),
    ("llama", 2, hiding(slice(N + TURN - 4, N + TURN)), "right padding is not supported"),
    ("llama", 2, hiding(slice(N - 4, N + 4)), r"padding of the earlier prompt, \[0, 0\]"),
    ("gemma3", 2, hiding(slice(N, N + 4)), "not supported with sliding-window or recurrent layers"),
]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("llama", 2), ("gemma3", 2)])
def test_a_turn_that_cannot_follow_is_named_and_changes_nothing(family: str, rows: int) -> None:
    model, cache = build(family), RetainedCache(build(family).config)
    right = torch.cat([turn(1), turn(2)])[:rows]
    with METHODS["crystalcache"]()(model):
        at_once(model, torch.cat([prompt(N, seed=row) for row in range(rows)]), cache)
        expected = at_once(model, right, other := copy.deepcopy(cache))
        for _, _, given, words in (wrong for wrong in WRONG if wrong[:2] == (family, rows)):
            with pytest.raises(SpecError, match=words), torch.no_grad():
                model(**{"input_ids": turn(1), "past_key_values": cache, **given})
        assert torch.equal(at_once(model, right, cache), expected)
    assert live_sets(cache) == live_sets(other)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("policy", "words"), [
    ("snapkv", "equal length, or read padded turns inside `with run.reading.*pass attention_mask"),
    ("h2o", "equal length, and pass attention_mask"),
])
def test_a_padded_turn_that_a_policy_cannot_decide_names_a_way_out(policy: str, words: str) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with policy_from_name(policy, 0.5)(model) as run, torch.no_grad():
        at_once(model, torch.cat([prompt(N), prompt(N, seed=1)]), cache)
        padded = {**hiding(slice(N, N + 4)), "past_key_values": cache}
        with pytest.raises(SpecError, match=words):
            model(**padded)
        if "reading" in words:
            with run.reading():
                model(**padded)


@pytest.mark.law("decided-as-the-reference")
def test_scorers_without_states_see_all_stored_keys_and_the_segment_s_queries() -> None:
    model, cache = build("llama", dtype=torch.float64), RetainedCache(build("llama").config)
    observed, scorer = Observed(model), Looking(Needs("observed", None))
    with observed.forward(), METHODS["streamingllm"]()(model):
        at_once(model, prompt(N), cache)
    stored = cache.stored_positions()
    with observed.forward() as seen, method_of(scorer)(model):
        at_once(model, turn(1), cache)
    (observation,) = scorer.shown
    assert observation.seen == N + TURN
    assert observation.positions is not None
    assert observation.positions.tolist() == [*stored.tolist(), *range(N, N + TURN)]
    (view,) = observation.layers.values()
    np.testing.assert_allclose(view.q, seen.q, atol=1e-6)
    np.testing.assert_allclose(view.k, observed.stored(stored, seen), atol=1e-6)


@pytest.mark.spec("PO-TURN")
def test_a_larger_budget_brings_nothing_back_and_evicts_nothing() -> None:
    model = build("llama")
    for small, large in (
        (StreamingLLM(20, 2), StreamingLLM(60, 2)),
        (CrystalCache(20, ENDS, TINY, "numpy"), CrystalCache(60, ENDS, TINY, "numpy")),
    ):
        _, cache = read_prompt(model, small, N)
        before = cache.stored_positions().tolist()
        with large(model):
            at_once(model, turn(1), cache)
        assert cache.stored_positions().tolist() == [*before, *range(N, N + TURN)]


@pytest.mark.law("figures-are-counted-right")
def test_what_a_turn_reports() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with CrystalCache(6, ENDS, replace(TINY, T_max=32), "numpy")(model) as run:
        at_once(model, prompt(N), cache)
        assert isinstance(run.retentions[0], CrystalRetention)
        stored = cache.stored_length
        at_once(model, turn(1), cache)
    assert [one.seen for one in run.retentions] == [N + TURN]
    assert run.over_budget == cache.stored_length - 6 > 0
    assert stored < N
    assert run.bytes_freed == (N + TURN - cache.stored_length) * 3 * 2 * 2 * 12 * 4
    numbers = f"seen={N + TURN}, stored={cache.stored_length}, bytes_freed={run.bytes_freed}"
    kept = f"{cache.stored_length} of {N + TURN} tokens, budget 6: crystalcache"
    assert repr(run).startswith(f"Session('crystalcache', budget=6, kept='{kept}")
    assert repr(run).endswith(f", {numbers})")
    assert set(run.timings) == {"capture", "decision", "compaction"}


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_session_counts_the_bytes_that_pending_tokens_of_an_earlier_session_free(is_read: bool) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    rare, frequent = (replace(TINY, T_breath=every) for every in (64, 4))
    with CrystalCache(20, ENDS, rare, "numpy", decode=True)(model):
        at_once(model, prompt(N), cache)
        step_by_step(model, prompt(19), cache)
    before = cache.bytes_freed
    policy = CrystalCache(10, ENDS, frequent, "numpy", decode=True)
    with policy(model) as run, run.reading() if is_read else nullcontext():
        at_once(model, turn(1), cache)
    assert run.bytes_freed == cache.bytes_freed - before > 0


@pytest.mark.parametrize("chunk", [16, 100])
def test_a_model_s_own_chunk_size_counts(chunk: int) -> None:
    model, ids = build("llama"), prompt(N)
    expected = greedy(model, ids, NEW)
    assert model.generation_config is not None
    model.generation_config.prefill_chunk_size = chunk
    with METHODS["fullcache"]()(model) as run:
        assert torch.equal(greedy(model, ids, NEW), expected)
    assert run.kept is not None
    assert len(run.kept) == N


def test_the_cache_may_be_left_to_the_session() -> None:
    model, ids = build("llama"), prompt(N)
    with METHODS["crystalcache"]()(model) as run:
        with run.prompt(), torch.no_grad():
            cache: RetainedCache = model(input_ids=ids[:, :30]).past_key_values
            with pytest.raises(SpecError, match="must be the cache of the unfinished prompt"):
                model(input_ids=ids[:, 30:])
            with pytest.raises(SpecError, match="must be the cache of the unfinished prompt"):
                model(input_ids=ids[:, 30:], past_key_values=RetainedCache(model.config))
            model(input_ids=ids[:, 30:], past_key_values=cache)
        assert id(run.cache) == id(cache)
        assert run.kept is not None
        kept = len(run.kept)
        at_once(model, prompt(1), cache)
        assert cache.stored_length == kept + 1


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("block", [Session.prompt, Session.reading])
def test_a_block_belongs_inside_its_context(block: Callable[[Session], AbstractContextManager[None]]) -> None:
    """Check that an empty prompt block is no prompt, and that generate in such a block is a separate prompt."""
    model: Any = build("llama")
    run = METHODS["crystalcache"]()(model)
    with pytest.raises(SpecError, match="must be inside `with policy"), block(run):
        raise AssertionError
    with pytest.raises(SpecError, match="cache = 'crystalcache': needs a block: type `with policy"):
        model.generate(prompt(N), past_key_values=run.cache, max_new_tokens=2)
    with run:
        with run.prompt():
            pass
        assert run.cache is None
        with run.prompt(), pytest.raises(SpecError, match="processes a separate prompt"):
            greedy(model, prompt(N), 2)
        greedy(model, prompt(N), 2)
        assert run.kept is not None
    with pytest.raises(SpecError, match="must be inside `with policy"), block(run):
        raise AssertionError


@pytest.mark.law("refused-before-anything-changes")
def test_a_prompt_of_one_token_is_no_segment() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        with pytest.raises(SpecError, match="a single token is a decode step"), run.prompt():
            at_once(model, prompt(1), cache)
        with pytest.raises(SpecError, match="unusable cache"):
            at_once(model, prompt(5), cache)


@pytest.mark.law("unusable-after-a-failure")
def test_a_prompt_that_is_left_half_way_leaves_no_usable_cache() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        with pytest.raises(KeyboardInterrupt), run.prompt():
            at_once(model, prompt(N), cache)
            raise KeyboardInterrupt
        assert run.retentions == ()
        with pytest.raises(SpecError, match="unusable cache"):
            at_once(model, prompt(5), cache)
        greedy(model, prompt(N), 2)
        assert run.kept is not None


@pytest.mark.law("unusable-after-a-failure")
def test_a_context_that_ends_inside_a_block_leaves_no_usable_cache() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    run = METHODS["crystalcache"]()(model)
    run.__enter__()
    block = run.prompt()
    block.__enter__()
    at_once(model, prompt(N), cache)
    run.__exit__(None, None, None)
    with pytest.raises(SpecError, match="block ended inside a prompt"):
        cache.get_seq_length()


@pytest.mark.law("refused-before-anything-changes")
def test_pieces_of_other_padding_or_rows_are_refused() -> None:
    model, (ids, mask), none = build("llama"), batch(prompts()), torch.zeros(3, 3, dtype=torch.int64)
    cache = RetainedCache(model.config)
    with METHODS["crystalcache"]()(model) as run, run.prompt():
        at_once(model, ids[:, :30], cache, attention_mask=mask[:, :30])
        for wrong in (None, torch.cat([none, mask[:, 3:]], dim=1), mask[:, 30:]):
            with pytest.raises(SpecError, match="attention_mask"):
                at_once(model, ids[:, 30:], cache, attention_mask=wrong)
        with pytest.raises(SpecError, match="must have 3 rows, like the unfinished prompt"):
            at_once(model, prompt(4), cache)
        at_once(model, ids[:, 30:], cache, attention_mask=mask)
    assert len(sets(run)) == 3


@pytest.mark.spec("PO-READ")
def test_read_tokens_are_no_steps() -> None:
    """D does not decay, and the next decode-time eviction occurs at its step, with the read tokens in the tail."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with breathing()(model) as run:
        at_once(model, prompt(PROMPT), cache)
        step_by_step(model, tokens(2), cache)
        before = now(cache)[0]
        with run.reading():
            at_once(model, prompt(2 * T + 1, seed=4), cache)
            step_by_step(model, tokens(T), cache)
        assert states_of(cache).kind is Pending.READ
        after = now(cache)[0]
        assert np.array_equal(after.D, before.D)
        assert after.step == before.step == 2
        assert len(after.tail_ids) == 2 + 3 * T + 1
        stored = cache.stored_length
        step_by_step(model, tokens(T - 3), cache)
        assert cache.stored_length == stored + T - 3
        assert now(cache)[0].tail_ids
        at_once(model, tokens(1), cache)
        (state,) = states_of(cache).rows
    assert state.step == T == SHORT.T_breath
    assert state.tail_ids == ()
    assert cache.stored_length < stored


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("policy", [h2o, tova, lambda: rkv(W=4, every=3)], ids=["h2o", "tova", "rkv"])
def test_sums_take_up_what_was_read(policy: Callable[[], Any]) -> None:
    """Check that a turn after a text in `reading()` keeps the same tokens as one turn with this text and the turn."""
    model, actual = build("llama"), []
    for reads in (True, False):
        with CustomPolicy(policy(), 0.3)(model) as run:
            cache = RetainedCache(model.config)
            at_once(model, prompt(PROMPT), cache)
            around = run.reading() if reads else run.prompt()
            with around:
                at_once(model, prompt(6, seed=7), cache)
                if not reads:
                    at_once(model, prompt(8, seed=8), cache)
            if reads:
                at_once(model, prompt(8, seed=8), cache)
            actual.append(live_sets(cache))
    assert actual[0] == actual[1]


# Blocks, action inside them, words of the error.
NO_READING: list[tuple[tuple[str, ...], Callable[[Any, RetainedCache], object], str]] = [
    (("reading",), lambda model, cache: greedy(model, prompt(5), 2), "must contain a prompt inside reading"),
    (("reading",), lambda model, cache: model(input_ids=prompt(4)), "must contain a prompt inside reading"),
    (("reading",), lambda model, cache: at_once(model, prompt(4), RetainedCache(model.config)), "must contain a "),
    (("reading",), lambda model, cache: at_once(model, prompt(4).repeat(2, 1), cache), "must have 1 row, "),
    *((blocks, lambda model, cache: None, "must be inside `with policy") for blocks in (
        ("reading", "reading"), ("prompt", "reading"), ("reading", "prompt"), ("prompt", "prompt"),
    )),
]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("blocks", "act", "words"), NO_READING)
def test_what_is_no_reading_is_refused_and_changes_nothing(
    blocks: tuple[str, ...], act: Callable[[Any, RetainedCache], object], words: str,
) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model) as run:
        at_once(model, prompt(PROMPT), cache)
        before = live_sets(cache)
        with pytest.raises(SpecError, match=words), ExitStack() as stack:
            for block in blocks:
                stack.enter_context(getattr(run, block)())
            act(model, cache)
        assert live_sets(cache) == before
        with run.reading():
            at_once(model, prompt(4), cache)


@pytest.mark.law("refused-before-anything-changes")
def test_records_of_another_policy_and_states_that_do_not_know_all_are_refused() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["crystalcache"]()(model):
        at_once(model, prompt(PROMPT), cache)
        at_once(model, prompt(1), cache)
    with CustomPolicy(h2o(), 0.3)(model) as run, run.reading(), pytest.raises(SpecError, match="without records"):
        at_once(model, prompt(3), cache)
    at_once(model, prompt(1), cache)
    crystalcache = METHODS["crystalcache"]()
    with crystalcache(model) as run, run.reading(), pytest.raises(SpecError, match="do not cover all of them"):
        at_once(model, prompt(3), cache)


@pytest.mark.spec("CC-STEP")
def test_the_states_are_those_of_the_reference() -> None:
    """Compare states after a prompt, decode-time evictions, a turn in the middle of a tail, and more evictions."""
    steps = torch.split(tokens(2 * T + 3), 1, dim=1)
    texts = prompt(PROMPT), *steps, prompt(9, seed=5), *steps[:T]
    assert check_states(breathing(36), [[text] for text in texts]).step == 3 * T + 3


@pytest.mark.law("freed-memory")
def test_hundreds_of_generated_tokens_stay_at_the_budget() -> None:
    model, sizes = build("llama"), list[int]()
    with breathing(32)(model) as run:
        handle = model.register_forward_hook(
            lambda *_: sizes.append(0 if run.cache is None else run.cache.stored_length)
        )
        chosen = greedy(model, prompt(PROMPT), 150)
    handle.remove()
    assert run.cache is not None
    assert run.cache.get_seq_length() == PROMPT + 149
    assert max(sizes[1:]) <= 32 + T
    assert min(sizes[T:]) >= 32 - (SHORT.N_min - 1)
    life = Masked(model, prompt(PROMPT), run.kept.tolist())  # type: ignore[union-attr]
    assert chosen[0, : T + 1].tolist() == life.greedy(T + 1)


@pytest.mark.law("parts-equal-the-whole")
def test_beams_keep_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the first layer depend only on the token, so they show which tokens a row has read."""
    model: Any = build("llama")
    first = model.model.layers[0]
    with torch.no_grad():
        values = first.self_attn.v_proj(first.input_layernorm(model.model.embed_tokens.weight))
    changed: list[bool] = []
    reorder = RetainedCache.reorder_cache

    def watched(cache: RetainedCache, beam_idx: Tensor) -> None:
        changed.append(beam_idx.tolist() != list(range(len(beam_idx))))
        reorder(cache, beam_idx)

    monkeypatch.setattr(RetainedCache, "reorder_cache", watched)
    with breathing()(model) as run:
        model.generate(input_ids=prompt(PROMPT), max_new_tokens=2 * T - 1, num_beams=3, do_sample=False)
    assert any(changed[T:])
    assert run.cache is not None
    stored = run.cache.full_layers[0].values
    assert isinstance(stored, Tensor)
    tails = set()
    for row, state in enumerate(now(run.cache)):
        assert state.step == 2 * T - 2
        assert run.cache.stored_positions(row).tolist() == state.stored.tolist()
        n = len(state.tail_ids)
        assert n == T - 2
        read = stored[row, :, -n:].transpose(0, 1).reshape(n, -1)
        assert relative(read, values[list(state.tail_ids)]) < 1e-5
        tails.add(state.tail_ids)
    assert len(tails) > 1


@pytest.mark.spec("CC-BREATH-PROTECTED")
@pytest.mark.parametrize("protection", ["sink+recent", "none"])
def test_the_newest_tokens_are_safe_unless_the_paper_s_rule_is_asked_for(protection: Any) -> None:
    model = build("llama")
    with breathing(16, breath_protection=protection)(model) as run:
        greedy(model, prompt(PROMPT), 4 * T + 1)
    assert run.cache is not None
    seen, stored = run.cache.get_seq_length(), set(run.cache.stored_positions().tolist())
    assert seen == PROMPT + 4 * T
    safe = set(range(SHORT.N_sink)) | set(range(seen - SHORT.W_recent, seen))
    assert (safe <= stored) == (protection == "sink+recent")


@pytest.mark.law("refused-before-anything-changes")
def test_a_cache_that_grew_outside_the_context_is_refused_by_name() -> None:
    model = build("llama")
    _, cache = read_prompt(model, breathing())
    at_once(model, tokens(3), cache)
    stored = cache.stored_length
    with breathing()(model):
        for ids in (tokens(1), tokens(5)):
            with pytest.raises(SpecError, match=r"67 tokens.*read outside the context"):
                at_once(model, ids, cache)
    assert (cache.stored_length, cache.get_seq_length()) == (stored, PROMPT + 3)
    with breathing(decode=False)(model):
        at_once(model, tokens(1), cache)
    assert cache.get_seq_length() == PROMPT + 4


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("decode", [False, True])
def test_tokens_can_be_taken_back_until_a_breath(decode: bool) -> None:
    """A cropped cache continues as if the tokens had not been read. Past its last eviction it has no state."""
    model, caches = build("llama"), []
    for extra in (0, 3):
        cache = RetainedCache(model.config)
        with breathing(decode=decode)(model):
            at_once(model, prompt(PROMPT), cache)
            step_by_step(model, tokens(2 + extra), cache)
            cache.crop(-extra)
            at_once(model, prompt(5, seed=1), cache)
            caches.append(cache.stored_positions().tolist())
            at_once(model, tokens(1), cache)
            cache.crop(-2)
            with pytest.raises(SpecError, match="do not cover all of them"):
                at_once(model, prompt(5, seed=1), cache)
    assert caches[0] == caches[1]


@pytest.mark.law("decided-as-the-reference")
def test_steps_read_without_decode_do_not_fade() -> None:
    """Read one cache without decode, then with decode. D decays only in the second session."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with breathing(decode=False)(model):
        at_once(model, prompt(PROMPT), cache)
        (start,) = states_of(cache).rows
        step_by_step(model, tokens(2), cache)
        assert np.array_equal(now(cache)[0].D, start.D)
    with breathing()(model):
        at_once(model, tokens(1), cache)
    expected = decay(start.D, start.live.trunk_impact, SHORT)
    assert np.array_equal(now(cache)[0].D, expected)
    assert now(cache)[0].step == 3
    with breathing()(model):
        step_by_step(model, tokens(T - 3), cache)
    assert states_of(cache).rows[0].step == T
    assert states_of(cache).rows[0].tail_ids == ()


@pytest.mark.law("refused-before-anything-changes")
def test_a_backend_without_decode_is_refused_when_it_is_asked_for() -> None:
    engine = Backend("half", resolve("numpy").crystal)
    with pytest.raises(BackendUnavailable, match="breath"):
        CrystalCache(0.5, ENDS, TINY, engine, decode=True)
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with CrystalCache(0.5, ENDS, TINY, engine)(model):
        at_once(model, prompt(PROMPT), cache)
        at_once(model, tokens(1), cache)
        with pytest.raises(SpecError, match="a backend without decode"):
            at_once(model, tokens(5), cache)


C, BUDGET = 16, 24
PARAMETERS = replace(TINY, C=C, T_breath=8)
LONG = 5 * C + 7


def streaming(**options: Any) -> CrystalCache:
    return CrystalCache(BUDGET, ENDS, PARAMETERS, backend="numpy", **{"stream": True, **options})


@pytest.mark.law("decided-as-the-reference")
def test_a_stream_s_states_are_those_of_the_reference() -> None:
    segments = torch.split(prompt(LONG), C, dim=1)[:5]
    check_states(streaming(), [torch.split(segment, 5, dim=1) for segment in segments])


def test_what_is_left_at_the_end_of_the_context_is_a_segment() -> None:
    """Two or more tokens are a segment. A single token is a decode step and waits."""
    model = build("llama")
    for n, seen in ((C + 7, C + 7), (C + 1, C)):
        _, cache = read_prompt(model, streaming(), n)
        assert states_of(cache).rows[0].seen == seen
        assert states_of(cache).covers(n)
        with streaming()(model):
            at_once(model, prompt(3, seed=4), cache)
        assert states_of(cache).covers(n + 3)
        assert states_of(cache).rows[0].seen == n + 3


@pytest.mark.law("freed-memory")
@pytest.mark.law("parts-equal-the-whole")
def test_generate_streams() -> None:
    """A prompt longer than a segment and the generated tokens keep the cache at the budget."""
    model, sizes, cache = build("llama"), [], RetainedCache(build("llama").config)
    handle = model.register_forward_hook(lambda *_: sizes.append(cache.stored_length))
    with streaming()(model):
        chosen = greedy(model, prompt(LONG), 40, past_key_values=cache)
    handle.remove()
    assert max(sizes) <= BUDGET + C
    assert cache.get_seq_length() == LONG + 39
    again = RetainedCache(model.config)
    with streaming()(model):
        whole = torch.cat([prompt(LONG), chosen[:, :-1]], dim=1)
        logits = at_once(model, whole, again)
    assert logits[0, LONG - 1 :].argmax(-1).tolist() == chosen[0].tolist()


@pytest.mark.spec("CC-STEP")
@pytest.mark.parametrize(("generated", "seen", "steps", "tail"), [(True, LONG + 19, 19, 3), (False, 12, 12, 4)])
def test_tokens_after_the_open_segment_are_steps(generated: bool, seen: int, steps: int, tail: int) -> None:
    """The first generated token ends the open segment of the prompt. Later tokens are decode steps."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with streaming(decode=True)(model):
        greedy(model, prompt(LONG), 20, past_key_values=cache) if generated else step_by_step(model, prompt(12), cache)
    (state,) = now(cache)
    assert (state.seen, state.step, len(state.tail_ids)) == (seen, steps, tail)
    assert cache.stored_length <= BUDGET + tail
    assert cache.stored_positions().tolist() == state.stored.tolist()


@pytest.mark.parametrize("new", [1, 2, 20])
@pytest.mark.parametrize("decode", [False, True])
def test_a_stream_that_begins_with_one_token_has_a_cache(decode: bool, new: int) -> None:
    model = build("llama")
    with streaming(decode=decode)(model) as run:
        greedy(model, prompt(1), new, min_new_tokens=new)
    assert isinstance(run.cache, RetainedCache)
    assert run.cache.get_seq_length() == run.seen == new
    assert run.stored == run.cache.stored_length


@pytest.mark.parametrize("first", ["step", "reading", "turn"])
def test_a_session_that_continues_has_the_cache_that_it_continues(first: str) -> None:
    """Check that the first forward pass of the session may be a decode step, text without eviction or a turn."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with METHODS["streamingllm"]()(model):
        at_once(model, prompt(LONG), cache)
    with METHODS["streamingllm"]()(model) as run:
        assert run.cache is None
        with run.reading() if first == "reading" else nullcontext():
            at_once(model, prompt(1 if first == "step" else 3), cache)
        assert run.cache is cache
        assert run.seen == LONG + (1 if first == "step" else 3)
        with pytest.raises(SpecError, match="input_ids = 9999"):
            at_once(model, torch.tensor([[9999, 9999]]), RetainedCache(model.config))
    assert run.cache is cache


@pytest.mark.parametrize(("rows", "asked"), [(1, "argument"), (2, "config"), (2, "tuple")])
def test_all_outputs_are_of_all_pieces(rows: int, asked: str) -> None:
    """Compare outputs and losses with those of the model outside the context. No token is evicted."""
    model = prepared("Mixtral", **_GQA, num_local_experts=4, sliding_window=None)
    ids = torch.cat([prompt(LONG, seed=row) for row in range(rows)])
    flags = {"output_hidden_states": True, "output_router_logits": True}
    if asked == "config":
        for name, value in flags.items():
            setattr(model.config, name, value)
    options: dict[str, Any] = {"input_ids": ids, "labels": ids, **({} if asked == "config" else flags)}
    with torch.no_grad():
        plain = model(**options)
        with CrystalCache(LONG, ENDS, PARAMETERS, "numpy", stream=True)(model):
            if asked == "tuple":
                given = options | {"return_dict": False}
                actual = dict(zip(plain, model(**given), strict=True))
            else:
                actual = model(**options)
    for name in ("loss", "aux_loss", "logits"):
        assert relative(actual[name], plain[name]) < 1e-5
    for name in ("hidden_states", "router_logits"):
        for layer, expected in zip(actual[name], plain[name], strict=True):
            assert layer.shape == expected.shape
            assert relative(layer, expected) < 1e-5


@pytest.mark.law("refused-before-anything-changes")
def test_weights_of_pieces_are_refused_and_those_of_a_segment_served() -> None:
    model, cache = build("llama", attention="eager"), RetainedCache(build("llama").config)
    with streaming()(model):
        with pytest.raises(SpecError, match="output_attentions = True: a stream evicts during the forward pass"):
            at_once(model, prompt(LONG), cache, output_attentions=True)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            weights = model(input_ids=prompt(C), past_key_values=cache, output_attentions=True).attentions
    assert weights[0].shape == (1, 4, C, C)


@pytest.mark.law("refused-before-anything-changes")
def test_what_a_stream_does_not_serve_is_named() -> None:
    with pytest.raises(SpecError, match=r"budget = '0\.5': a stream has no end: give the budget"):
        CrystalCache(0.5, ENDS, PARAMETERS, "numpy", stream=True)
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with streaming()(model) as run:
        with pytest.raises(SpecError, match="segments end after every C tokens"), run.prompt():
            raise AssertionError
        with pytest.raises(SpecError, match="cannot be used in a stream"), run.reading():
            raise AssertionError
        with pytest.raises(SpecError, match=r"num_beams = 2: .* beams would change rows"):
            greedy(model, prompt(LONG), 2, num_beams=2)
        with pytest.raises(SpecError, match="a stream does not support padding"):
            at_once(model, prompt(LONG), cache, attention_mask=(torch.arange(LONG) > 3).long()[None])
        with pytest.raises(SpecError, match="input_ids = 9999"):
            at_once(model, torch.cat([prompt(LONG), torch.tensor([[9999]])], dim=1), cache)
        assert cache.get_seq_length() == 0
        at_once(model, prompt(3), cache)
        with pytest.raises(SpecError, match="must be the cache of the unfinished prompt"):
            at_once(model, prompt(3), RetainedCache(model.config))
