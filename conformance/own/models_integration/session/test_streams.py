"""stream=True: segments end every C tokens, wherever the forwards end."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from conformance.own.models_integration.session.families import (
    _GQA,
    ENDS,
    at_once,
    build,
    crossed,
    greedy,
    prepare,
    prompt,
    relative,
    states_of,
)
from conformance.own.models_integration.session.sessions import Observed, now, same_state
from models_integration import CrystalCache, RetainedCache
from reference.crystalcache import empty_state, extend
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.retention import Retention

pytestmark = pytest.mark.law("parts-equal-the-whole")

C, BUDGET = 16, 24
PARAMETERS = replace(TINY, C=C, T_breath=8)
N = 5 * C + 7
CUTS: dict[str, list[int]] = {
    "segments": [C] * 5 + [7], "single": [1] * N, "whole": [N], "odd": [3, 30, 1, 20, 1, 1, 31],
}


def streaming(**options: Any) -> CrystalCache:
    return CrystalCache(BUDGET, ENDS, PARAMETERS, backend="numpy", **{"stream": True, **options})


@crossed("cut", ["odd", "single", "whole"], whole=("llama",))
def test_it_does_not_matter_where_the_forwards_end(family: str, cut: str) -> None:
    """Logits of all tokens, and the kept set, are those of a stream that comes segment by segment."""
    dtype = torch.float32 if family == "gemma2" else torch.float64
    model, ids = build(family, dtype=dtype), prompt(N)
    found = []
    for lengths in (CUTS["segments"], CUTS[cut]):
        cache = RetainedCache(model.config)
        with streaming()(model):
            logits = torch.cat([at_once(model, piece, cache) for piece in torch.split(ids, lengths, dim=1)], dim=1)
        found.append((logits, cache.stored_positions().tolist()))
    (expected, stored), (logits, kept) = found
    assert relative(logits, expected) < (1e-5 if family == "gemma2" else 1e-10)
    assert kept == stored
    assert len(kept) <= BUDGET


@pytest.mark.law("decided-as-the-reference")
def test_the_states_are_those_of_the_reference() -> None:
    model, ids = build("llama", dtype=torch.float64), prompt(N)
    observed, expected = Observed(model), empty_state(parse_budget(BUDGET))
    cache = RetainedCache(model.config)
    with streaming()(model) as run:
        for piece in torch.split(ids, C, dim=1)[:5]:
            with observed.forward() as seen:
                for part in torch.split(piece, 5, dim=1):
                    at_once(model, part, cache)
            k = observed.stored(expected.stored, seen)
            expected = extend(expected, seen.q, k, piece[0].numpy(), ENDS, PARAMETERS)
            (state,) = states_of(cache).rows
            same_state(state, expected)
            assert cache.stored_positions().tolist() == expected.stored.tolist()
            assert run.kept is not None
            assert run.kept.tolist() == expected.stored.tolist()


def test_what_is_left_at_the_end_of_the_context_is_a_segment() -> None:
    """Two tokens or more; a single one is a decode step, and waits."""
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
    """A prompt longer than any segment, then token by token, all held at the budget."""
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
def test_generated_tokens_are_steps_where_decode_is_on() -> None:
    """The open segment ends with the first of them, and breaths do the rest."""
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with streaming(decode=True)(model):
        greedy(model, prompt(N), 20, past_key_values=cache)
    (state,) = now(cache)
    assert (state.seen, state.step, len(state.tail_ids)) == (N + 19, 19, 3)
    assert cache.stored_length <= BUDGET + 3
    assert cache.stored_positions().tolist() == state.stored.tolist()


@pytest.mark.spec("CC-STEP")
def test_a_first_token_alone_may_be_followed_by_steps() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with streaming(decode=True)(model):
        for token in torch.split(prompt(12), 1, dim=1):
            at_once(model, token, cache)
    (state,) = now(cache)
    assert (state.seen, state.step, len(state.tail_ids)) == (12, 12, 4)


def test_rows_of_a_batch_stream_as_they_do_alone() -> None:
    model = build("llama", dtype=torch.float64)
    ids = torch.cat([prompt(N, seed=row) for row in range(3)])
    cache = RetainedCache(model.config)
    with streaming()(model) as run:
        together = at_once(model, ids, cache)
    assert isinstance(run.retention, tuple)
    for row in range(3):
        single = RetainedCache(model.config)
        with streaming()(model) as alone:
            expected = at_once(model, ids[row : row + 1], single)
        assert relative(together[row], expected[0]) < 1e-10
        assert isinstance(alone.retention, Retention)
        assert cache.stored_positions(row).tolist() == single.stored_positions().tolist()


@pytest.mark.parametrize(("rows", "asked"), [(1, "argument"), (2, "config"), (2, "tuple")])
def test_all_outputs_are_of_all_pieces(rows: int, asked: str) -> None:
    """Nothing is evicted, so that they are those of the model outside the context, its losses included."""
    torch.manual_seed(0)
    model = prepare(MixtralForCausalLM(MixtralConfig(**_GQA, num_local_experts=4, sliding_window=None)))
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
                found = dict(zip(plain, model(**given), strict=True))
            else:
                found = model(**options)
    for name in ("loss", "aux_loss", "logits"):
        assert relative(found[name], plain[name]) < 1e-5
    for name in ("hidden_states", "router_logits"):
        for layer, expected in zip(found[name], plain[name], strict=True):
            assert layer.shape == expected.shape
            assert relative(layer, expected) < 1e-5


@pytest.mark.law("refused-before-anything-changes")
def test_weights_of_pieces_are_refused_and_those_of_a_segment_served() -> None:
    model, cache = build("llama", attention="eager"), RetainedCache(build("llama").config)
    with streaming()(model):
        with pytest.raises(SpecError, match="output_attentions = True: a stream evicts inside this forward"):
            at_once(model, prompt(N), cache, output_attentions=True)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            weights = model(input_ids=prompt(C), past_key_values=cache, output_attentions=True).attentions
    assert weights[0].shape == (1, 4, C, C)


@pytest.mark.law("refused-before-anything-changes")
def test_what_a_stream_does_not_serve_is_named() -> None:
    with pytest.raises(SpecError, match=r"budget = '0\.5': a stream needs a number of tokens"):
        CrystalCache(0.5, ENDS, PARAMETERS, "numpy", stream=True)
    model, cache = build("llama"), RetainedCache(build("llama").config)
    with streaming()(model) as run:
        with pytest.raises(SpecError, match="segments end every C tokens"), run.prompt():
            raise AssertionError
        with pytest.raises(SpecError, match="num_beams = 2: beams would change places"):
            greedy(model, prompt(N), 2, num_beams=2)
        with pytest.raises(SpecError, match="rows of a stream start together"):
            at_once(model, prompt(N), cache, attention_mask=(torch.arange(N) > 3).long()[None])
        with pytest.raises(SpecError, match="input_ids = 9999"):
            at_once(model, torch.cat([prompt(N), torch.tensor([[9999]])], dim=1), cache)
        assert cache.get_seq_length() == 0
        at_once(model, prompt(3), cache)
        with pytest.raises(SpecError, match="must be the cache of the prompt that is open"):
            at_once(model, prompt(3), RetainedCache(model.config))


@pytest.mark.law("unusable-after-a-failure")
def test_a_piece_that_fails_leaves_no_usable_cache() -> None:
    model, cache = build("llama"), RetainedCache(build("llama").config)
    calls: list[int] = []

    def third(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("boom")

    handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(third)
    with streaming()(model):
        with pytest.raises(RuntimeError, match="boom"):
            at_once(model, prompt(N), cache)
        handle.remove()
        with pytest.raises(SpecError, match="unusable cache"):
            at_once(model, prompt(3), cache)
        other = RetainedCache(model.config)
        assert at_once(model, prompt(N), other).shape[1] == N


SHORT_STREAM = """
import json
from conformance.measure.benchmarks.stream import streamed
rows = streamed(4000, 200, "numpy")
print(json.dumps([{"tokens": row.tokens, "stored": row.stored, "peak_rss": row.peak_rss} for row in rows]))
"""


@pytest.mark.law("freed-memory")
def test_positions_are_right_and_memory_is_flat() -> None:
    """The short form of `conformance.measure.benchmarks.stream`, in a process whose peak no other test has raised."""
    child = subprocess.run([sys.executable, "-c", SHORT_STREAM], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    rows = json.loads(child.stdout.splitlines()[-1])
    assert rows[-1]["tokens"] == 4000
    assert all(row["stored"] <= 512 + 256 for row in rows)
    assert rows[-1]["peak_rss"] <= 1.05 * rows[4]["peak_rss"]
