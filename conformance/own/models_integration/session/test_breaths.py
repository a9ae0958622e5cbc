"""decode=True: the cache is held at its budget while tokens are generated."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import (
    ENDS,
    at_once,
    build,
    greedy,
    prompt,
    relative,
    states_of,
)
from conformance.own.models_integration.session.masked import Masked
from conformance.own.models_integration.session.sessions import SHORT, Observed, T, breathing, now, same_state, tokens
from models_integration import CrystalCache, RetainedCache
from reference.crystalcache import decode_step, empty_state, extend
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.breath import decay
from spec.backend import Backend, resolve
from spec.budget import parse_budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import TINY

N = 64


@pytest.mark.spec("CC-STEP")
def test_the_states_are_those_of_the_reference() -> None:
    """Prompt, breaths, a turn in the middle of a tail, more breaths: to the last kept position, and beyond."""
    model = build("llama", dtype=torch.float64)
    observed, expected = Observed(model), empty_state(parse_budget(36))
    with breathing(36)(model):
        cache = RetainedCache(model.config)
        for ids in (prompt(N), *torch.split(tokens(2 * T + 3), 1, dim=1), prompt(9, seed=5), *torch.split(
            tokens(T), 1, dim=1
        )):
            with observed.forward() as seen:
                at_once(model, ids, cache)
            numbers = ids[0].numpy()
            if len(numbers) == 1:
                norm = float(inverse_key_norms(seen.new_k)[0])
                expected = decode_step(expected, int(numbers[0]), norm, ENDS, SHORT, resolve("numpy"))
            else:
                k = observed.stored(expected.stored, seen)
                expected = extend(expected, seen.q, k, numbers, ENDS, SHORT)
            (state,) = now(cache)
            same_state(state, expected)
            assert cache.stored_positions().tolist() == expected.stored.tolist()
    assert expected.step == 3 * T + 3


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_fewer_tokens_than_a_breath_equal_no_decode(family: str) -> None:
    model = build(family)
    chosen = []
    for decode in (True, False):
        with breathing(decode=decode)(model) as run:
            chosen.append(greedy(model, prompt(N), T))
        assert run.cache is not None
        assert run.kept is not None
        assert run.cache.stored_length == len(run.kept) + T - 1
    assert torch.equal(*chosen)


@pytest.mark.law("freed-memory")
def test_hundreds_of_generated_tokens_stay_at_the_budget() -> None:
    model, sizes = build("llama"), list[int]()
    with breathing(32)(model) as run:
        handle = model.register_forward_hook(
            lambda *_: sizes.append(0 if run.cache is None else run.cache.stored_length)
        )
        chosen = greedy(model, prompt(N), 150)
    handle.remove()
    assert run.cache is not None
    assert run.cache.get_seq_length() == N + 149
    assert max(sizes[1:]) <= 32 + T
    assert min(sizes[T:]) >= 32 - (SHORT.N_min - 1)
    life = Masked(model, prompt(N), run.kept.tolist())  # type: ignore[union-attr]
    assert chosen[0, : T + 1].tolist() == life.greedy(T + 1)


@pytest.mark.law("parts-equal-the-whole")
def test_beams_keep_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam that goes on as another was takes that one's state with it.

    The first layer's values depend on nothing but the token: they say which tokens a row has read.
    """
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
        model.generate(input_ids=prompt(N), max_new_tokens=2 * T - 1, num_beams=3, do_sample=False)
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
        greedy(model, prompt(N), 4 * T + 1)
    assert run.cache is not None
    seen, stored = run.cache.get_seq_length(), set(run.cache.stored_positions().tolist())
    assert seen == N + 4 * T
    safe = set(range(SHORT.N_sink)) | set(range(seen - SHORT.W_recent, seen))
    assert (safe <= stored) == (protection == "sink+recent")


@pytest.mark.law("refused-before-anything-changes")
def test_a_cache_that_grew_outside_the_context_is_refused_by_name() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with breathing()(model):
        at_once(model, prompt(N), cache)
    at_once(model, tokens(3), cache)
    stored = cache.stored_length
    with breathing()(model):
        for ids in (tokens(1), tokens(5)):
            with pytest.raises(SpecError, match=r"67 tokens.*read outside the context"):
                at_once(model, ids, cache)
    assert (cache.stored_length, cache.get_seq_length()) == (stored, N + 3)
    with breathing(decode=False)(model):
        at_once(model, tokens(1), cache)
    assert cache.get_seq_length() == N + 4


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("decode", [False, True])
def test_tokens_can_be_taken_back_until_a_breath(decode: bool) -> None:
    """A state goes on from what is left; once it has gone beyond a token, it is forgotten with it."""
    model, caches = build("llama"), []
    for extra in (0, 3):
        cache = RetainedCache(model.config)
        with breathing(decode=decode)(model):
            at_once(model, prompt(N), cache)
            for token in torch.split(tokens(2 + extra), 1, dim=1):
                at_once(model, token, cache)
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
    """One cache, one session without decode and one with it: D decays for the tokens of the second alone."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with breathing(decode=False)(model):
        at_once(model, prompt(N), cache)
        (start,) = states_of(cache).rows
        for token in torch.split(tokens(2), 1, dim=1):
            at_once(model, token, cache)
        assert np.array_equal(now(cache)[0].D, start.D)
    with breathing()(model):
        at_once(model, tokens(1), cache)
    expected = decay(start.D, start.live.trunk_impact, SHORT)
    assert np.array_equal(now(cache)[0].D, expected)
    assert now(cache)[0].step == 3
    with breathing()(model):
        for token in torch.split(tokens(T - 3), 1, dim=1):
            at_once(model, token, cache)
    assert states_of(cache).rows[0].step == T
    assert states_of(cache).rows[0].tail_ids == ()


@pytest.mark.law("refused-before-anything-changes")
def test_a_backend_without_decode_is_refused_when_it_is_asked_for() -> None:
    engine = Backend("half", resolve("numpy").crystal)
    with pytest.raises(BackendUnavailable, match="breath"):
        CrystalCache(0.5, ENDS, TINY, engine, decode=True)
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with CrystalCache(0.5, ENDS, TINY, engine)(model):
        at_once(model, prompt(N), cache)
        at_once(model, tokens(1), cache)
        with pytest.raises(SpecError, match="a backend without decode"):
            at_once(model, tokens(5), cache)


@pytest.mark.law("unusable-after-a-failure")
def test_a_breath_that_fails_leaves_no_usable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)

    def fail(*_: object) -> None:
        raise MemoryError

    with breathing()(model):
        at_once(model, prompt(N), cache)
        for token in torch.split(tokens(T - 1), 1, dim=1):
            at_once(model, token, cache)
        monkeypatch.setattr("models_integration.cache.crystal_states.decode_step", fail)
        with pytest.raises(MemoryError):
            at_once(model, tokens(1), cache)
    with pytest.raises(SpecError, match="a decode step failed"):
        cache.get_seq_length()
