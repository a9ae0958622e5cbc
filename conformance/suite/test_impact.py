"""Tests of S3: counts, rarity, impact and trunk impact."""

import itertools
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.oracles import s3
from conformance.strategies.numbers import ablations, forms, token_ids
from conformance.strategies.trunks import dyadic_impacts, partitions, record
from spec.arrays import IntVector, Vector
from spec.backend import BreathStages, CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters


@st.composite
def salient_tokens(draw: st.DrawFn, p: CrystalCacheParameters = PAPER) -> tuple[Vector, IntVector]:
    """Draw salience in [M_min, M_max], often at the bounds, and ids."""
    n = draw(st.integers(1, 20), label="n")
    inside = st.one_of(st.sampled_from([p.M_min, p.M_max]), st.floats(p.M_min, p.M_max))
    S = draw(st.lists(inside, min_size=n, max_size=n), label="salience")
    return np.array(S), draw(token_ids(n), label="ids")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Vector, IntVector, CrystalCacheParameters]:
    p = draw(ablations(), label="parameters")
    return *draw(salient_tokens(p), label="tokens"), p


@pytest.mark.spec("CC-IMPACT", "CC-COUNT", "CC-RARITY")
@given(case=cases())
def test_impact_equals_the_brute_force(
    stages: CrystalStages, case: tuple[Vector, IntVector, CrystalCacheParameters],
) -> None:
    """M_i MUST be Eq. 22 of salience and rarity, or the ablation of Eq. 22."""
    S, ids, p = case
    assert not list(stage_checks.impact(stages.impact(S, ids, p), S, ids, p))


@pytest.mark.spec("CC-COUNT")
@given(tokens=salient_tokens(), data=st.data())
def test_ids_are_names(stages: CrystalStages, tokens: tuple[Vector, IntVector], data: st.DataObject) -> None:
    """A bijection of the ids MUST NOT change M, bit for bit."""
    S, ids = tokens
    values = sorted(set(ids.tolist()))
    names = data.draw(st.lists(st.integers(0, 10**9), min_size=len(values), max_size=len(values), unique=True))
    renamed = np.array([dict(zip(values, names, strict=True))[i] for i in ids.tolist()])
    assert stages.impact(S, ids, PAPER).tolist() == stages.impact(S, renamed, PAPER).tolist()


@pytest.mark.spec("CC-COUNT")
def test_ids_are_told_apart_by_every_bit(stages: CrystalStages) -> None:
    """Check that ids with equal low or equal high 32 bits are different ids."""
    ids = np.array([5, 2**32 + 5, 2**32 + 6, 2**53, 2**53 + 1])
    assert stages.impact(np.ones(5), ids, PAPER).tolist() == stages.impact(np.ones(5), np.arange(5), PAPER).tolist()


@pytest.mark.spec("CC-COUNT")
@given(tokens=salient_tokens(), data=st.data())
def test_order_of_tokens_says_nothing(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], data: st.DataObject,
) -> None:
    """Check that a permutation of the tokens permutes M, because Eq. 20 counts over the whole context."""
    S, ids = tokens
    order = np.array(data.draw(st.permutations(range(len(S))), label="order"))
    assert stages.impact(S, ids, PAPER)[order].tolist() == stages.impact(S[order], ids[order], PAPER).tolist()


@pytest.mark.spec("CC-RARITY")
@given(count=st.integers(1, 200))
def test_a_further_mention_lowers_the_impact(stages: CrystalStages, count: int) -> None:
    """Check that U falls strictly with c and is in (0, 1 / (1 + ln 2)], so that 6.406 = 1/2 + 10 U(1)."""
    S = np.full(count + 1, 1.0)
    fewer = stages.impact(S[:-1], np.zeros(count, dtype=np.int64), PAPER)[0]
    more = stages.impact(S, np.zeros(count + 1, dtype=np.int64), PAPER)[0]
    assert 0.5 < more < fewer < 6.4062


@pytest.mark.spec("CC-IMPACT")
@given(tokens=salient_tokens(), data=st.data())
def test_impact_rises_with_salience_and_never_meets_the_clip(
    stages: CrystalStages, tokens: tuple[Vector, IntVector], data: st.DataObject,
) -> None:
    """Check that M_i rises with S and is in [10 U_min + 0.05, 15.907], up to the bound of rounding."""
    S, ids = tokens
    at = data.draw(st.integers(0, len(S) - 1), label="token")
    raised = S.copy()
    raised[at] = data.draw(st.floats(float(S[at]), PAPER.M_max), label="raised salience")
    low, high = stages.impact(S, ids, PAPER), stages.impact(raised, ids, PAPER)
    assert (high >= low).all()
    least = 10 * s3.rarity(len(S)) + 0.05
    assert low.min() >= least or tolerances.close("CC-IMPACT", [low.min()], [least])
    assert high.max() <= 15.907


@pytest.mark.spec("CC-IMPACT", "CC-RARITY", "CC-RARITY-FORMS", "CC-UNIT-IMPACT")
@given(case=cases(), data=st.data())
def test_rarity_of_given_counts(
    breath_stages: BreathStages, case: tuple[Vector, IntVector, CrystalCacheParameters], data: st.DataObject,
) -> None:
    """Check every form of rarity and impact for given counts, as a breath uses them.

    Some counts are integers that float32 cannot hold.
    """
    S, _, p = case
    counts = data.draw(st.lists(
        st.one_of(st.integers(1, 9), st.sampled_from([2**24 + 1, 2**31, 2**32 + 1])), min_size=len(S), max_size=len(S),
    ), label="counts")
    more = data.draw(forms(), label="forms")
    p = replace(p, rarity=more.rarity, impact="unit" if more.impact == "unit" else p.impact)
    actual = breath_stages.impact(S, np.array(counts), p)
    want = [s3.token_impact(x, s3.rarity_of(c, p), p, S.max()) for x, c in zip(S.tolist(), counts, strict=True)]
    assert tolerances.close("CC-IMPACT", actual, want)


@pytest.mark.spec("CC-IMPACT")
@given(case=cases())
def test_given_counts_are_as_good_as_ids(
    breath_stages: BreathStages, case: tuple[Vector, IntVector, CrystalCacheParameters],
) -> None:
    """M_i MUST follow Eq. 22 for given counts too, because a breath stores the count of each id."""
    S, ids, p = case
    counts = np.array([ids.tolist().count(i) for i in ids.tolist()])
    assert not list(stage_checks.impact(breath_stages.impact(S, counts, p), S, ids, p))


@pytest.mark.spec("CC-IMPACT", "CC-COUNT")
@pytest.mark.parametrize("form", ["mixture", "salience", "uniform"])
def test_impact_is_an_array_of_its_own(stages: CrystalStages, form: Literal["mixture", "salience", "uniform"]) -> None:
    """Check that M does not share memory with S, so that a later change of M does not change S."""
    S = np.array([0.5, 1.0, 2.0])
    actual = stages.impact(S, np.array([3, 4, 3]), replace(PAPER, impact=form))
    assert not np.shares_memory(actual, S)
    assert actual.dtype == np.float64


@pytest.mark.spec("CC-IMPACT")
def test_impact_is_clipped(stages: CrystalStages) -> None:
    """Check the clip of Eq. 22 with parameters for which the clip is active."""
    p = replace(PAPER, M_min=0.9, M_max=1.0)
    assert stages.impact(np.array([0.9, 1.0]), np.array([3, 3]), p).tolist() == [0.9, 0.9]
    wide = replace(PAPER, M_min=0.0, M_max=0.5)
    assert stages.impact(np.array([0.5]), np.array([3]), wide).max() <= 0.5


@pytest.mark.spec("CC-TRUNK-IMPACT")
@given(data=st.data(), M=dyadic_impacts(12))
def test_trunk_impact_is_the_mean_of_the_best_three(
    stages: CrystalStages, data: st.DataObject, M: Vector,
) -> None:
    """Check that trunk impact is exactly the mean of the three largest impacts, and rises with each member."""
    offsets = data.draw(partitions(12), label="trunks").offsets
    ends = np.isin(np.arange(1, 13), offsets)
    actual = record([1.0] * 12, [[] for _ in M], [[] for _ in M], 8, 4)
    trunks = stages.trunks(actual, M, ends, PAPER)
    at = data.draw(st.integers(0, 11), label="token")
    raised = M.copy()
    raised[at] += data.draw(st.integers(0, 8), label="raise") / 4
    higher = stages.trunks(actual, raised, ends, PAPER).impact
    assert trunks.offsets.tolist() == offsets.tolist()
    for g, (start, stop) in enumerate(itertools.pairwise(offsets)):
        best = sorted(M[start:stop].tolist(), reverse=True)[:3]
        assert trunks.impact[g] == sum(best) / len(best)
    assert (higher >= trunks.impact).all()


@pytest.mark.spec("CC-RARITY")
@pytest.mark.parametrize("count", [1, 2, 10, 100, 1000])
def test_impact_of_a_token_that_occurs_so_often(stages: CrystalStages, count: int) -> None:
    """Check Eq. 21 at the counts that the paper prints. The paper's .295 for a count of 10 is .294."""
    S, ids = np.full(count, 1.0), np.zeros(count, dtype=np.int64)
    assert not list(stage_checks.impact(stages.impact(S, ids, PAPER), S, ids, PAPER))


@pytest.mark.spec("CC-TRUNK-IMPACT")
def test_the_best_three_are_added_from_the_largest_down(stages: CrystalStages) -> None:
    """Check that impacts are added in descending order: (.3 + .2) + .1 is .6. Ascending, it is the next float."""
    actual = record([1.0] * 4, [[] for _ in range(4)], [[] for _ in range(4)], 8, 4)
    M = np.array([0.1, 0.3, 0.05, 0.2])
    assert stages.trunks(actual, M, np.arange(4) == 3, PAPER).impact.tolist() == [0.6 / 3] != [(0.1 + 0.2 + 0.3) / 3]


COUNTS = [*range(1, 130), *[2**bits + more for bits in range(8, 12) for more in (-1, 0, 1)], 708, 745, 746, 4_097]
"""Counts of an id: all small ones, counts around powers of two, and counts whose exponential is subnormal or 0."""


@pytest.mark.spec("CC-RARITY", "CC-COUNT", "CC-RARITY-FORMS", "CC-IMPACT")
@pytest.mark.parametrize("form", ["logarithm", "reciprocal", "exponential"])
def test_rarity_alone(stages: CrystalStages, form: Literal["logarithm", "reciprocal", "exponential"]) -> None:
    """Check M without salience, which is only the rarity, for ids in random order."""
    p = replace(PAPER, rarity=form, M_min=0.0)
    ids = np.repeat(np.arange(len(COUNTS)), COUNTS)
    order = np.random.default_rng(0).permutation(len(ids))
    actual = np.empty(len(ids))
    actual[order] = stages.impact(np.zeros(len(ids)), ids[order], p)
    starts = np.cumsum([0, *COUNTS[:-1]])
    assert (actual == np.repeat(actual[starts], COUNTS)).all()
    want = [s3.token_impact(0.0, s3.rarity_of(c, p), p, 0.0) for c in COUNTS]
    assert tolerances.close("CC-IMPACT", actual[starts], want)


@pytest.mark.spec("CC-RARITY", "CC-RARITY-FORMS", "CC-IMPACT")
@pytest.mark.parametrize("form", ["logarithm", "reciprocal", "exponential"])
def test_rarity_of_given_counts_alone(
    breath_stages: BreathStages, form: Literal["logarithm", "reciprocal", "exponential"],
) -> None:
    """Check M without salience, for counts up to 1 100 and around every power of two up to 2^53."""
    p = replace(PAPER, rarity=form, M_min=0.0)
    counts = [*range(1, 1_100), *[2**bits + more for bits in range(11, 54) for more in (-1, 0, 1)]]
    actual = breath_stages.impact(np.zeros(len(counts)), np.array(counts), p)
    assert tolerances.close("CC-IMPACT", actual, [s3.token_impact(0.0, s3.rarity_of(c, p), p, 0.0) for c in counts])
