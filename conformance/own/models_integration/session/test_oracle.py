"""Eviction equals masking: the compacted cache against the full one with minus infinity on what was evicted."""

import copy

import pytest
import torch

from conformance.own.models_integration.session.crossings import crossed
from conformance.own.models_integration.session.families import (
    ENDS,
    FAMILIES,
    METHODS,
    SLIDING,
    WINDOW,
    Masked,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from conformance.own.models_integration.session.oracle_checks import (
    PROMPT,
    check_decoding,
    check_generation,
    check_hidden_token,
    check_stored_tensors,
)
from models_integration import CrystalCache, prefill

pytestmark = pytest.mark.law("eviction-equals-masking")

families_and_methods = crossed("method", METHODS, always=["crystalcache"])


@families_and_methods
@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("CC-COMPACT")
def test_logits_after_eviction_equal_those_after_masking(family: str, method: str) -> None:
    check_decoding(build(family), METHODS[method]())


@families_and_methods
def test_generated_tokens_after_eviction_equal_those_after_masking(family: str, method: str) -> None:
    check_generation(build(family), METHODS[method]())


@families_and_methods
@pytest.mark.spec("CC-COMPACT")
def test_slots_hold_the_tensors_of_their_positions(family: str, method: str) -> None:
    check_stored_tensors(build(family), METHODS[method]())


# OPT counts positions in a mask that its caller gives: a token that is hidden there has none.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*SLIDING, "opt")])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_2d_mask_counts_tokens_and_not_slots(family: str, attention: str) -> None:
    check_hidden_token(build(family, attention=attention), METHODS["crystalcache"]())


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers_are_never_compacted(family: str) -> None:
    model = build(family)
    prefilled = prefill(model, METHODS["crystalcache"](), prompt(PROMPT))
    lengths = [layer.keys.shape[2] for layer in prefilled.cache.layers]  # type: ignore[union-attr]
    kept = prefilled.cache.stored_length
    assert kept < PROMPT
    assert lengths == [WINDOW - 1, kept, WINDOW - 1, kept]
    assert prefilled.cache.get_seq_length() == PROMPT
    assert [layer.get_seq_length() for layer in prefilled.cache.layers] == [PROMPT] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_eager_attention_is_served_as_it_is(family: str) -> None:
    check_decoding(build(family, attention="eager"), METHODS["crystalcache"]())


@pytest.mark.parametrize("cuts", [(2, 1, 5), (1, 6, 1), (3, 5)])
def test_a_compacted_cache_goes_on_in_pieces_of_any_size(cuts: tuple[int, ...]) -> None:
    model, ids, following = build("llama"), prompt(PROMPT), prompt(8, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    expected = Masked(model, ids, cache.stored_positions().tolist()).read(following)
    pieces = [at_once(model, piece, cache) for piece in torch.split(following, list(cuts), dim=1)]
    assert relative(torch.cat(pieces, dim=1), expected) < 1e-5


def test_generate_goes_on_outside_the_context() -> None:
    model, ids, following = build("llama"), prompt(PROMPT), prompt(5, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    oracle = Masked(model, ids, cache.stored_positions().tolist())
    chosen = [int(oracle.read(following)[0, -1].argmax())]
    while len(chosen) < 6:
        chosen.append(int(oracle.read(torch.tensor([[chosen[-1]]]))[0, -1].argmax()))
    whole = torch.cat([ids, following], dim=1)
    assert greedy(model, whole, 6, past_key_values=cache)[0].tolist() == chosen


def test_the_paper_s_parameters_on_a_longer_prompt() -> None:
    model, ids, following = build("llama"), prompt(300), prompt(8, seed=9)
    prefilled = prefill(model, CrystalCache(0.6, ENDS, backend="numpy"), ids)
    kept = prefilled.cache.stored_positions().tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-128:] == list(range(300 - 128, 300))
    expected = Masked(model, ids, kept).read(following)
    assert relative(at_once(model, following, copy.deepcopy(prefilled.cache)), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_served(dtype: torch.dtype) -> None:
    model, ids, following = build("llama", dtype=dtype), prompt(PROMPT), prompt(8, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    expected = Masked(model, ids, cache.stored_positions().tolist()).read(following)
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    assert relative(at_once(model, following, cache), expected) < tolerance
