"""Single inputs of the suite reveal one planted wrong number."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.suite import (
    test_activation,
    test_coattention,
    test_dissolution,
    test_diversity,
    test_extensions,
    test_graph,
    test_nestedkv,
    test_policy_stages,
    test_resonance,
    test_score,
)
from reference import backend, diversity, nestedkv
from reference.backend import BACKEND
from reference.crystalcache import coverage
from spec.arrays import Vector

Wrong = Callable[..., Any]
CRYSTAL, BREATH, POLICIES = BACKEND.require_crystal(), BACKEND.require_breath(), BACKEND.require_policies()
DIVERSITY, NESTED = BACKEND.require_diversity(), BACKEND.require_nestedkv()


def with_stage(stages: Any, **wrong: Wrong) -> Any:
    """Return the stages of the reference with some wrong stages."""
    names = [name for name in dir(stages) if not name.startswith("_")]
    return SimpleNamespace(**{name: getattr(stages, name) for name in names} | wrong)


def positions_of_16_bits(score: Any, trunks: Any, *rest: Any) -> Any:
    actual = CRYSTAL.dissolve(score, trunks, *rest)
    return replace(actual, kept=actual.kept.astype(np.int16).astype(np.int64))


def backwards(coattention: Any, trunks: Any, p: Any) -> Any:
    """Return a graph whose degrees are summed from the right."""
    actual = CRYSTAL.graph(coattention, trunks, p)
    rows = np.split(actual.weights, actual.indptr[1:-1])
    return replace(actual, degree=np.array([np.cumsum(row[::-1])[-1] if len(row) else 0.0 for row in rows]))


def one_pass(degree: Vector, old: int, p: Any) -> Vector:
    sigma = max(0.0, float(np.mean(degree**2)) - float(np.mean(degree)) ** 2) ** 0.5 or 1.0
    actual: Vector = 1 / (1 + np.exp(-p.s * (degree - np.mean(degree)) / sigma))
    return actual[old:]


def counted(limit: int) -> Wrong:
    """Return a decay function that has no effect after `limit` calls."""
    calls = iter(range(limit))
    return lambda D, M, p: BREATH.decay(D, M, p) if next(calls, None) is not None else D


def fused(s: Any, V: Any, retained: Any, k: int, lam: float) -> Any:
    """Return two of three tokens. The second gain is not rounded."""
    gains = [Fraction(s[i]) - Fraction(lam) * Fraction(float(V[0] @ V[i])) for i in (1, 2)]
    return np.array([0, 1 if gains[0] >= gains[1] else 2])


def beyond(holds: Callable[..., bool], module: Any, name: str, wrong: Wrong, stage: Wrong) -> Wrong:
    """Return a stage with a different function inside, for arguments that satisfy `holds`."""
    def run(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if holds(*given):
                patch.setattr(module, name, wrong)
            return stage(*given)

    return run


def running_sums(unit: Any, W: int) -> Any:
    """Return means of windows from running float32 sums over the whole prompt."""
    total = np.pad(np.cumsum(unit.astype(np.float32), axis=1), ((0, 0), (1, 0), (0, 0))).astype(np.float64)
    stop = np.arange(1, unit.shape[1] + 1)
    start = np.maximum(0, stop - W)
    return (total[:, stop] - total[:, start]) / (stop - start)[None, :, None]


def last_frequency(q: Any, k: Any, v: Any, at: Any, ahead: Any, inv_freq: Any, *rest: Any) -> Any:
    known = np.append(inv_freq[:-1], 0.0) if 2 * len(inv_freq) > 64 else inv_freq
    return POLICIES.expected_attention(q, k, v, at, ahead, known, *rest)


def half_sums(q: Any, k: Any, *rest: Any) -> Any:
    actual = POLICIES.received_attention(q, k, *rest)
    return actual.astype(np.float16).astype(np.float64) if k.shape[1] > 1024 else actual


def any_of_equals(values: Any, shares: Any, pinned: Any) -> Any:
    """Give ties to the higher token if there are more than 26 tokens."""
    tilt = 1e-9 * np.arange(values.shape[1]) if values.shape[1] > 26 else 0.0
    return POLICIES.best_tokens(values + tilt, shares, pinned)


Slip = tuple[Any, str, Wrong, Callable[..., object], tuple[Any, ...]]
SLIPS: Mapping[str, Slip] = {
    "members": (
        CRYSTAL, "dissolve", lambda score, trunks, impact, *rest: CRYSTAL.dissolve(
            score, trunks, impact.astype(np.float32).astype(np.float64), *rest
        ), test_dissolution.test_members_closer_than_float32_are_told_apart, (),
    ),
    "positions": (
        CRYSTAL, "dissolve", positions_of_16_bits, test_dissolution.test_positions_of_16_bits_are_too_few,
        (2**16 - 9,),
    ),
    "logarithm of the sum": (
        CRYSTAL, "score", lambda D, impact, *rest: CRYSTAL.score(D, np.expm1(np.log(1 + impact)), *rest),
        test_score.test_small_impacts_have_logarithms, (),
    ),
    "clipped logits": (
        CRYSTAL, "coattention", lambda q, *rest: CRYSTAL.coattention(np.clip(q, -10_000, 10_000) * 1e-4, *rest),
        test_coattention.test_logits_beyond_ten_thousand, (),
    ),
    "C of 31 bits": (
        CRYSTAL, "coattention", lambda q, k, positions, p, *rest: CRYSTAL.coattention(
            q, k, positions, replace(p, C=1) if p.C + 1 >= 2**31 else p, *rest
        ), test_coattention.test_the_largest_chunk_is_one_chunk, (),
    ),
    "four heads at most": (
        CRYSTAL, "coattention", lambda q, k, positions, p, *rest: CRYSTAL.coattention(
            q, k, positions, replace(p, k_heads=min(p.k_heads, 4)), *rest
        ), test_coattention.test_many_heads_are_summed, (11, [19.0, 8.0]),
    ),
    "degree": (CRYSTAL, "graph", backwards, test_graph.test_a_degree_is_added_from_the_left, (150,)),
    "one pass": (
        BREATH, "segment_crystallization", one_pass,
        test_resonance.test_degrees_of_all_trunks_that_are_close_have_a_spread, (),
    ),
    "pulses strictly above": (
        BREATH, "resonance", lambda D, W, active, p: BREATH.resonance(
            D, W, active, replace(p, tau_pulse=float(np.nextafter(p.tau_pulse, 1)))
        ), test_resonance.test_a_pulse_at_the_threshold_arrives, (2,),
    ),
    "negative zeros": (
        BREATH, "inverse_key_norms",
        lambda k: np.where(np.signbit(k).all(axis=2).any(axis=0), 1.0, BREATH.inverse_key_norms(k)),
        test_activation.test_a_key_of_negative_zeros_is_zero, (np.float32,),
    ),
    "5000 calls": (BREATH, "decay", counted(5_000), test_resonance.test_the_number_of_calls_says_nothing, (1,)),
    "fused": (DIVERSITY, "diverse", fused, test_diversity.test_what_redundancy_costs_is_rounded, (0.01,)),
    # Beyond 256 tokens, the products of a cosine are added in pairs, as libraries do.
    "order of sums": (
        DIVERSITY, "diverse", beyond(
            lambda s, *_: len(s) > 256, diversity, "dots", lambda V, x: (V * x).sum(axis=1), DIVERSITY.diverse,
        ), test_diversity.test_products_are_added_in_the_order_of_channels,
        (300, [1.0] * 24, [1 + 2.0**-52], [1.0] + [2.0**-53] * 23),
    ),
    "a gap of floats": (
        NESTED, "anomaly_score", lambda k, p: NESTED.anomaly_score(
            k, replace(p, p=Fraction(max(1, int(float(p.p) * k.shape[1])), k.shape[1]))
        ), test_nestedkv.test_the_share_of_the_gap_is_exact, ("float32", "15/22", 22),
    ),
    "channels by sixteen": (
        NESTED, "anomaly_score",
        lambda k, p: NESTED.anomaly_score(k[:, :, : max(4, k.shape[2] // 16 * 16)], p),
        test_nestedkv.test_every_channel_counts, ("float64", 33),
    ),
    "windows": (
        NESTED, "anomaly_score", beyond(
            lambda k, p: k.shape[1] > 2048, nestedkv, "current_memory", running_sums, NESTED.anomaly_score,
        ), test_nestedkv.test_windows_far_from_the_start, ("float64",),
    ),
    "frequency": (
        POLICIES, "expected_attention", last_frequency,
        test_policy_stages.test_expected_attention_of_many_heads_and_channels, ("float64", 5, 5, 128),
    ),
    "factor of few heads": (
        POLICIES, "expected_attention", lambda q, *rest: POLICIES.expected_attention(
            q / np.float32(rest[5]) if len(q) > 4 else q, *rest
        ), test_policy_stages.test_expected_attention_of_many_heads_and_channels, ("float64", 8, 2, 16),
    ),
    "half": (
        POLICIES, "received_attention", half_sums, test_policy_stages.test_half_precision_beyond_a_thousand_keys,
        (1_100,),
    ),
    # Keys have the dtype of the queries, as in a cache that is cast to the dtype of the model.
    **{f"{stage} of cast keys": (
        POLICIES, stage, lambda q, k, *rest, stage=stage: getattr(POLICIES, stage)(q, k.astype(q.dtype), *rest),
        test_policy_stages.test_a_longer_type_is_not_rounded_to_float16, ("float32", "keys", "float32", "float16"),
    ) for stage in ("received_attention", "largest_attention", "expected_attention")},
    "ties": (
        POLICIES, "best_tokens", any_of_equals,
        test_policy_stages.test_ties_among_hundreds_go_to_the_lower_token, (100,),
    ),
}


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", SLIPS)
def test_the_input_tells(name: str) -> None:
    stages, stage, wrong, test, arguments = SLIPS[name]
    with pytest.raises(AssertionError):
        test(with_stage(stages, **{stage: wrong}), *arguments)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(("name", "share"), [("coverage", 0.29), ("spacing", 0.5)])
def test_coverage_in_floats_is_told(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(sizes: Any, protected: Any, B: int, share: float) -> int:
        return int(share * B) if sizes.sum() > B else 0

    def spaced(candidates: Any, k: int) -> Any:
        return candidates[((np.arange(k) + 0.5) * (len(candidates) / k)).astype(np.int64)]

    if name == "coverage":
        monkeypatch.setattr(backend, "coverage_reserve", reserve)
        with pytest.raises(AssertionError):
            test_extensions.test_a_share_is_the_decimal_that_is_written(CRYSTAL, share, 100, 29)
    else:
        monkeypatch.setattr(coverage, "evenly_spaced", spaced)
        with pytest.raises(AssertionError):
            test_extensions.test_spacing_is_counted_in_whole_tokens(CRYSTAL, 30, 11)
