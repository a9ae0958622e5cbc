"""Splices composed with eviction, sliding windows, archives of half the layers, and generation."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conformance.own.models_integration.archive.block_mask import Oracle, block_masked, ids
from conformance.own.models_integration.archive.models import build
from conformance.own.models_integration.archive.test_splice import BOUND, CHUNKS, QUERY, read
from conformance.own.models_integration.session.families import relative
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import Chunk, computed, splice, upper_half
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.rotation import plain_layers, recognise
from reference.policies import retain
from reference.policies.protections import Places, protecting
from reference.policies.streaming_llm import streaming_llm
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import Observation
from spec.retention import Retention

pytestmark = pytest.mark.law("a-splice-equals-a-block-mask")

SESSION = ids(12, 8)
VISIBLE = sum(len(chunk) - hidden for chunk, hidden in CHUNKS)
FAMILIES = ["Llama", "Gemma3Text", "DeepseekV2"]


def kept_of(seen: int, evicted: set[int]) -> Retention:
    return Retention.shared(np.array([at for at in range(seen) if at not in evicted], dtype=np.int64), seen)


def chunks_of(model: PreTrainedModel) -> list[Chunk]:
    rotary = recognise(model)
    return [computed(model, chunk, rotary, hidden, markers=(0, len(chunk) - 1)) for chunk, hidden in CHUNKS]


def window_of(model: PreTrainedModel) -> int | None:
    slides = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    return model.config.sliding_window if slides else None


def stored(oracle: Oracle, cache: RetainedCache) -> float:
    return max(
        relative(layer.keys, expected.keys[:, :, oracle.visible])
        for layer, expected in zip(plain_layers(cache), plain_layers(oracle.cache), strict=True) if not layer.is_sliding
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_splice_into_an_evicted_session(family: str) -> None:
    model, evicted = build(family), {2, 3, 7, 8, 9}
    _, cache = read(model, SESSION)
    cache.compact([kept_of(len(SESSION), evicted)])
    splice(cache, chunks_of(model), recognise(model))
    logits, cache = read(model, QUERY, cache)
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, evicted=evicted, window=window_of(model))
    assert relative(logits, oracle.logits) < BOUND
    assert stored(oracle, cache) < BOUND
    assert cache.stored_positions().tolist() == [
        at for at in range(len(SESSION) + VISIBLE + len(QUERY)) if at not in evicted
    ]
    assert cache.get_seq_length() == len(SESSION) + VISIBLE + len(QUERY)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV2"])
def test_eviction_after_a_splice_keeps_the_markers(family: str) -> None:
    """Tokens of the session and of the chunks go; the policy's own five parts keep the markers."""
    model = build(family)
    _, cache = read(model, SESSION)
    markers = splice(cache, chunks_of(model), recognise(model)).tolist()
    assert markers == [12, 18, 24, 25, 30]  # the first marker of the hidden preamble is not spliced
    seen = cache.get_seq_length()
    policy = streaming_llm(2)
    plain, _ = retain(policy, parse_budget(8), Observation(seen, 1, None, {}))
    kept, _ = retain(protecting(policy, markers), parse_budget(8), Observation(seen, 1, None, {}))
    assert not {12, 18, 24} <= set(plain.positions.tolist())
    assert set(markers) <= set(kept.positions.tolist())
    assert len(kept.positions) == 8
    cache.compact([kept])
    logits, cache = read(model, QUERY, cache)
    evicted = set(range(seen)) - set(kept.positions.tolist())
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, evicted=evicted)
    assert relative(logits, oracle.logits) < BOUND
    assert stored(oracle, cache) < BOUND


@pytest.mark.spec("PO-RETAIN")
def test_protection_alone_may_exceed_the_budget() -> None:
    policy = protecting(streaming_llm(2), [5, 7, 9])
    kept, _ = retain(policy, parse_budget(1), Observation(20, 1, None, {}))
    assert {0, 1, 5, 7, 9} <= set(kept.positions.tolist())


@pytest.mark.law("the-model-stays-as-it-was")
def test_places_are_marked_in_a_copy() -> None:
    """Positions that are not there yet are left out; another protection's own marks stay as they were."""
    marks = np.array([True, False, False])
    assert Places(lambda seen: marks, (2, 5))(3).tolist() == [True, False, True]
    assert marks.tolist() == [True, False, False]
    assert protecting(streaming_llm(2), [0, 8]) == protecting(streaming_llm(2), [8, 0, 8])


@pytest.mark.parametrize("window", [6, 20, 34, 64])
def test_a_window_counts_positions_across_a_splice(window: int) -> None:
    """Windows that end inside the query, inside the chunks, inside the session, and nowhere."""
    model = build("Gemma3Text", sliding_window=window)
    _, cache = read(model, SESSION)
    splice(cache, chunks_of(model), recognise(model))
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, window=window)
    logits, cache = read(model, QUERY[:3], cache)
    assert relative(logits, oracle.logits[:, :3]) < BOUND
    logits, cache = read(model, QUERY[3:], cache)
    assert relative(logits, oracle.logits[:, 3:]) < BOUND
    assert plain_layers(cache)[0].keys.shape[2] <= window - 1
    cache.reset()
    assert relative(read(model, SESSION, cache)[0], read(model, SESSION)[0]) == 0


def test_a_splice_between_turns_goes_on_twice() -> None:
    """Session, chunk, turn, another chunk, turn: each chunk is seen by what follows it alone."""
    model = build("Gemma3Text", sliding_window=9)
    first, second, _ = chunks_of(model)
    rotary, turn = recognise(model), ids(5, 9)
    _, cache = read(model, SESSION)
    splice(cache, [first], rotary)
    read(model, turn, cache)
    splice(cache, [second], rotary)
    assert cache.stored_positions().tolist() == list(range(12 + 7 + 5 + 6))
    logits, _ = read(model, QUERY, cache)
    tokens = SESSION + CHUNKS[0][0] + turn + CHUNKS[1][0] + QUERY
    n, owner = len(tokens), [0] * 12 + [1] * 7 + [3] * 5 + [2] * 9 + [4] * 4
    hidden = [False] * 24 + [True] * 3 + [False] * 10
    positions = [*range(24), *range(21, 34)]
    full, near = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for row in range(n):
        for column in range(row + 1):
            live = owner[row] in (3, 4) and not hidden[column]
            full[row, column] = owner[row] == owner[column] or live
            read_by_it = owner[row] == owner[column] or (owner[row] in (3, 4) and owner[column] in (0, 3))
            near[row, column] = read_by_it and positions[row] - positions[column] < 9
    with torch.no_grad():
        wanted = model(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]),
            attention_mask={"full_attention": full[None, None], "sliding_attention": near[None, None]},
        ).logits[:, -4:]
    assert relative(logits, wanted) < BOUND


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
def test_an_archive_of_the_upper_half(family: str, attention: str) -> None:
    model = build(family)
    model.set_attn_implementation(attention)
    chunks = [
        Chunk(chunk.ids, upper_half(chunk.layers, 2), chunk.hidden, chunk.markers, chunk.rotary)
        for chunk in chunks_of(model)
    ]
    assert all(sorted(chunk.layers) == [1] for chunk in chunks)
    _, cache = read(model, SESSION)
    splice(cache, chunks, recognise(model))
    assert [layer.get_seq_length() for layer in plain_layers(cache)] == [len(SESSION) + VISIBLE] * 2
    with pytest.raises(SpecError, match="layers that differ"):
        read(model, QUERY[:1], cache)
    with layer_masks(model, cache):
        logits = torch.cat([read(model, part, cache)[0] for part in (QUERY[:3], QUERY[3:])], 1)
    model.set_attn_implementation("sdpa")
    oracle = block_masked(model, SESSION, CHUNKS, QUERY, lower={0})
    assert relative(logits, oracle.logits) < BOUND
    assert relative(logits, block_masked(model, SESSION, CHUNKS, QUERY).logits) > 100 * BOUND
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(SpecError, match="attn_implementation"), layer_masks(model, cache):
        pass


def generated(model: PreTrainedModel, cache: RetainedCache, tokens: list[int]) -> list[int]:
    options: dict[str, Any] = {
        "attention_mask": torch.ones(1, cache.get_seq_length() + len(tokens), dtype=torch.int64),
        "past_key_values": cache, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
    }
    found = model.generate(torch.tensor([tokens]), **options)  # type: ignore[operator]
    answer: list[int] = found[0, len(tokens) :].tolist()
    return answer


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_generate_goes_on_from_a_splice(family: str) -> None:
    model = build(family)
    _, cache = read(model, SESSION)
    splice(cache, chunks_of(model), recognise(model))
    answer = generated(model, cache, QUERY)
    oracle = block_masked(model, SESSION, CHUNKS, [*QUERY, *answer], window=window_of(model))
    assert answer == oracle.logits[0, len(QUERY) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_splice_into_an_empty_cache(family: str) -> None:
    model = build(family)
    cache = RetainedCache(model.config.get_text_config(decoder=True))
    splice(cache, chunks_of(model), recognise(model))
    logits, _ = read(model, QUERY, cache)
    oracle = block_masked(model, [], CHUNKS, QUERY, window=window_of(model))
    assert relative(logits, oracle.logits) < BOUND
