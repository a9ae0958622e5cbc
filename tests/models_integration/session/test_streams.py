"""Decode-time eviction keeps the cache at its budget during generation. A stream ends a segment every C tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models_integration import CrystalCache, RetainedCache
from reference.crystalcache.breath import decay
from spec.backend import Backend, resolve
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import TINY
from tests.models_integration.session.families import (
    _GQA,
    ENDS,
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
from tests.models_integration.session.sessions import PROMPT, SHORT, T, breathing, check_states, now, tokens


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
    """Check that a beam that continues from a second beam gets the state of the second beam.

    The values of the first layer depend only on the token. They show which tokens a row has read.
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
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with breathing()(model):
        at_once(model, prompt(PROMPT), cache)
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
    """A cropped cache continues as if the removed tokens had not been read.

    A cache that is cropped past its last eviction has no state.
    """
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
    """Read one cache in a session without decode, then in a session with decode.

    D decays only in the second session.
    """
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


pytestmark = pytest.mark.law("parts-equal-the-whole")

C, BUDGET = 16, 24
PARAMETERS = replace(TINY, C=C, T_breath=8)
N = 5 * C + 7
def streaming(**options: Any) -> CrystalCache:
    return CrystalCache(BUDGET, ENDS, PARAMETERS, backend="numpy", **{"stream": True, **options})


@pytest.mark.law("decided-as-the-reference")
def test_a_stream_s_states_are_those_of_the_reference() -> None:
    segments = torch.split(prompt(N), C, dim=1)[:5]
    check_states(streaming(), [torch.split(segment, 5, dim=1) for segment in segments])


def test_what_is_left_at_the_end_of_the_context_is_a_segment() -> None:
    """Two or more tokens are a segment. A single token is a decode step and waits."""
    model = build("llama")
    for n, seen in ((C + 7, C + 7), (C + 1, C)):
        cache = RetainedCache(model.config)
        with streaming()(model):
            at_once(model, prompt(n), cache)
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
        chosen = greedy(model, prompt(N), 40, past_key_values=cache)
    handle.remove()
    assert max(sizes) <= BUDGET + C
    assert cache.get_seq_length() == N + 39
    again = RetainedCache(model.config)
    with streaming()(model):
        whole = torch.cat([prompt(N), chosen[:, :-1]], dim=1)
        logits = at_once(model, whole, again)
    assert logits[0, N - 1 :].argmax(-1).tolist() == chosen[0].tolist()


@pytest.mark.spec("CC-STEP")
@pytest.mark.parametrize(("generated", "seen", "steps", "tail"), [(True, N + 19, 19, 3), (False, 12, 12, 4)])
def test_tokens_after_the_open_segment_are_steps(generated: bool, seen: int, steps: int, tail: int) -> None:
    """Check generated tokens and single tokens.

    The first generated token ends the open segment of the prompt. Later tokens are evicted by decode-time eviction.
    """
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with streaming(decode=True)(model):
        greedy(model, prompt(N), 20, past_key_values=cache) if generated else step_by_step(model, prompt(12), cache)
    (state,) = now(cache)
    assert (state.seen, state.step, len(state.tail_ids)) == (seen, steps, tail)
    assert cache.stored_length <= BUDGET + tail
    assert cache.stored_positions().tolist() == state.stored.tolist()


@pytest.mark.parametrize(("rows", "asked"), [(1, "argument"), (2, "config"), (2, "tuple")])
def test_all_outputs_are_of_all_pieces(rows: int, asked: str) -> None:
    """Compare outputs and losses with those of the model outside the context. No token is evicted."""
    model = prepared("Mixtral", **_GQA, num_local_experts=4, sliding_window=None)
    ids = torch.cat([prompt(N, seed=row) for row in range(rows)])
    flags = {"output_hidden_states": True, "output_router_logits": True}
    if asked == "config":
        for name, value in flags.items():
            setattr(model.config, name, value)
    options: dict[str, Any] = {"input_ids": ids, "labels": ids, **({} if asked == "config" else flags)}
    with torch.no_grad():
        plain = model(**options)
        with CrystalCache(N, ENDS, PARAMETERS, "numpy", stream=True)(model):
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
            at_once(model, prompt(N), cache, output_attentions=True)
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
            greedy(model, prompt(N), 2, num_beams=2)
        with pytest.raises(SpecError, match="a stream does not support padding"):
            at_once(model, prompt(N), cache, attention_mask=(torch.arange(N) > 3).long()[None])
        with pytest.raises(SpecError, match="input_ids = 9999"):
            at_once(model, torch.cat([prompt(N), torch.tensor([[9999]])], dim=1), cache)
        assert cache.get_seq_length() == 0
        at_once(model, prompt(3), cache)
        with pytest.raises(SpecError, match="must be the cache of the unfinished prompt"):
            at_once(model, prompt(3), RetainedCache(model.config))
