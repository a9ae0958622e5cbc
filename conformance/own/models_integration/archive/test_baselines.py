"""The arms that injection is compared with, by the equalities that define them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.measure import injection_baselines as baselines
from conformance.measure.injection_baselines import ARMS, Case, cacheblend, legolink, recompute
from conformance.own.models_integration.archive.block_mask import ids
from conformance.own.models_integration.archive.models import ROTATIONS, build
from conformance.own.models_integration.archive.test_splice import BOUND, BOUND_BF16, QUERY, SYSTEM, read
from conformance.own.models_integration.session.families import relative
from models_integration.archive.splice import computed
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.rotation import plain_layers, recognise
from spec.errors import SpecError

pytestmark = pytest.mark.law("a-splice-equals-a-block-mask")

PARTS = [ids(7, 3), ids(9, 4)]
PREFIX, SUFFIX = [127, 4], [128]
WRAPPED = [token for part in PARTS for token in [*PREFIX, *part, *SUFFIX]]
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Phi3", "Mistral", "Glm", "GPTNeoX", "DeepseekV2", "DeepseekV3"]


def case_of(family: str = "Llama", **changes: Any) -> Case:
    model = build(family, **changes)
    rotary = recognise(model)
    raw = tuple(computed(model, part, rotary) for part in PARTS)
    wrapped = tuple(
        computed(model, [*PREFIX, *part, *SUFFIX], rotary, markers=(0, len(part) + 2)) for part in PARTS
    )
    return Case(model, rotary, tuple(SYSTEM), raw, wrapped, tuple(PREFIX), len(QUERY))


def tensors(cache: RetainedCache) -> list[Tensor]:
    return [tensor.float() for layer in plain_layers(cache) for tensor in (layer.keys, layer.values)]


def distance(a: RetainedCache, b: RetainedCache) -> float:
    return max(relative(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_all_tokens_is_the_full_prefill(family: str) -> None:
    case = case_of(family)
    wanted = ARMS["text_wrapped"](case)
    assert distance(wanted, read(case.model, SYSTEM + WRAPPED)[1]) == 0
    logits = read(case.model, SYSTEM + WRAPPED + QUERY)[0][:, -4:]
    for found in (ARMS["full_recompute"](case), cacheblend(case, 1.0), legolink(case, 99)):
        assert distance(found, wanted) < BOUND
        assert relative(read(case.model, QUERY, found)[0], logits) < BOUND
    assert distance(ARMS["inject"](case), wanted) > 100 * BOUND


@pytest.mark.parametrize("rotation", ["linear", "yarn", "llama3", "longrope"])
def test_recomputing_all_tokens_is_the_full_prefill_of_every_rotation(rotation: str) -> None:
    case = case_of(rope_parameters=dict(ROTATIONS[rotation]))
    assert distance(ARMS["full_recompute"](case), ARMS["text_wrapped"](case)) < BOUND


def test_recomputing_in_bfloat16() -> None:
    case = case_of(dtype=torch.bfloat16)
    assert distance(ARMS["full_recompute"](case), ARMS["text_wrapped"](case)) < BOUND_BF16


def test_recomputing_nothing_is_the_plain_splice() -> None:
    case = case_of()
    for cache in (legolink(case, 0), cacheblend(case, 0.0)):
        assert distance(cache, ARMS["inject"](case)) == 0


def test_legolink_renews_the_first_tokens_of_each_chunk() -> None:
    """Those of the first chunk depend on the session alone, and are right; no other token changes."""
    case = case_of()
    found, wanted, plain = legolink(case, 3), ARMS["text_wrapped"](case), ARMS["inject"](case)
    first, second = len(SYSTEM), len(SYSTEM) + 10
    kept = [*range(first), *range(first + 3, second), *range(second + 3, second + 12)]
    for a, b, c in zip(tensors(found), tensors(wanted), tensors(plain), strict=True):
        assert relative(a[:, :, first : first + 3], b[:, :, first : first + 3]) < BOUND
        assert torch.equal(a[:, :, kept], c[:, :, kept])
    assert distance(found, wanted) < distance(plain, wanted)


def test_cacheblend_takes_the_tokens_that_deviate_most(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    chosen: list[int] = []
    monkeypatch.setattr(baselines, "recompute", lambda model, cache, tokens, positions: chosen.extend(positions))
    cacheblend(case, 0.25)
    spliced, fresh = (plain_layers(ARMS[name](case))[1].keys for name in ("inject", "text_wrapped"))
    apart = [float(((spliced - fresh)[0, :, at] ** 2).sum()) for at in range(len(SYSTEM), len(SYSTEM + WRAPPED))]
    best = sorted(range(len(apart)), key=lambda at: -apart[at])[: len(apart) // 4]
    assert chosen == [at + len(SYSTEM) for at in sorted(best)]


def test_values_of_an_unshifted_splice_are_right_and_its_keys_are_not() -> None:
    case = case_of()
    still, moved = ARMS["no_shift"](case), ARMS["inject"](case)
    for index, (a, b) in enumerate(zip(tensors(still), tensors(moved), strict=True)):
        assert (relative(a, b) == 0) == (index % 2 == 1)
    assert torch.equal(plain_layers(still)[0].keys[0, :, 5:15], case.wrapped[0].layers[0][0])


def test_the_paper_s_prefix_arms_hold_what_they_say() -> None:
    case = case_of()
    at, end = len(SYSTEM) + len(PREFIX), len(SYSTEM) + len(PREFIX) + 16
    found, session = ARMS["prefix"](case), read(case.model, [*SYSTEM, *PREFIX])[1]
    sink = ARMS["global_sink"](case)
    assert (found.get_seq_length(), sink.get_seq_length()) == (end, 4 + 16)
    for a, b, c in zip(tensors(found), tensors(session), tensors(sink), strict=True):
        assert relative(a[:, :, :at], b) == 0
        assert relative(c[:, :, :4], b[:, :, :4]) < BOUND
    values = [plain_layers(cache)[1].values for cache in (found, sink)]
    assert torch.equal(values[0][:, :, at:], values[1][:, :, 4:])
    assert torch.equal(values[0][0, :, at : at + 7], case.raw[0].layers[1][1])


def test_text_is_the_raw_chunks_read() -> None:
    case = case_of()
    assert distance(ARMS["text"](case), read(case.model, [*SYSTEM, *PARTS[0], *PARTS[1]])[1]) == 0


def test_every_arm_goes_on_and_leaves_the_case_as_it_was() -> None:
    case = case_of()
    before = [tensor.clone() for chunk in case.wrapped for pair in chunk.layers.values() for tensor in pair]
    answers = {name: read(case.model, QUERY, arm(case))[0] for name, arm in ARMS.items()}
    assert all(answer.isfinite().all() for answer in answers.values())
    names = [name for name in ARMS if name != "full_recompute"]  # which is text_wrapped
    for one in names:
        assert all(relative(answers[one], answers[other]) > BOUND for other in names if other != one)
    after = [tensor for chunk in case.wrapped for pair in chunk.layers.values() for tensor in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.law("refused-before-anything-changes")
def test_what_cannot_be_recomputed_is_refused() -> None:
    case = case_of()
    cache = ARMS["inject"](case)
    kept = tensors(cache)
    with pytest.raises(SpecError, match=r"positions = \[3, 400\]"):
        recompute(case.model, cache, [5, 6], [3, 400])
    assert all(torch.equal(a, b) for a, b in zip(kept, tensors(cache), strict=True))
    sliding = build("Gemma3Text")
    with pytest.raises(SpecError, match="layer 0"):
        recompute(sliding, read(sliding, SYSTEM)[1], [5], [3])
    for wrong in (-0.1, 1.5):
        with pytest.raises(SpecError, match="r = "):
            cacheblend(case, wrong)
    with pytest.raises(SpecError, match="k = -1"):
        legolink(case, -1)
