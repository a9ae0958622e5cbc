"""Budgets and selectors on given scores: exact totals, published misses, ties."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.assurance.policy_cases import CASES
from conformance.methods import policies as oracle
from conformance.strategies.policy_inputs import decided, drawn, observation, retained
from reference.policies import keydiff
from reference.policies.budgets import Adaptive, Competition, Pyramid, adakv_official, pyramidkv_official
from reference.policies.protections import Places, SinkAndRecent
from reference.policies.selectors import top_units
from spec.errors import SpecError
from spec.policy import Scores

pytestmark = pytest.mark.usefixtures("reference_items")


@pytest.mark.spec("PO-TOP-UNITS")
@given(
    units=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 5)), min_size=1, max_size=8),
    B=st.integers(0, 20),
)
def test_units_of_several_sizes_stay_whole(units: list[tuple[int, bool, int]], B: int) -> None:
    """One by one from the highest score; the first that does not fit MUST end it, though a smaller one might fit."""
    sizes, pinned, marks = zip(*units, strict=True)
    offsets = np.cumsum([0, *sizes])
    values = np.where(pinned, np.nan, marks)[None].astype(np.float64)
    found = top_units(Scores(values, offsets), np.array([B]), np.repeat(pinned, sizes))
    kept = [u for u in range(len(units)) if pinned[u]]
    for u in sorted(set(range(len(units))) - set(kept), key=lambda u: (-marks[u], u)):
        if sum(sizes[i] for i in [*kept, u]) > B:
            break
        kept.append(u)
    assert found.positions.tolist() == [i for u in sorted(kept) for i in range(offsets[u], offsets[u + 1])]


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET")
def test_the_two_safeguards_differ() -> None:
    """The same scores: a quota gives [7, 1], a blend [6, 2]; kvpress reads the safeguard as a quota. 1 is even."""
    rows = [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], [1.0] + [0.0] * 7]
    scores = Scores(np.array(rows), np.arange(9), heads=2)
    assert Competition(Fraction(1, 4))(8, scores).tolist() == [7, 1]
    assert Adaptive(Fraction(1, 2))(8, scores).tolist() == [6, 2]
    assert Competition(1)(8, scores).tolist() == Adaptive(1)(8, scores).tolist() == [4, 4]


@pytest.mark.spec("PO-PYRAMID-BUDGET", "PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET")
@given(total=st.integers(18, 120), seed=st.integers(0, 2**32 - 1))
def test_a_total_that_does_not_divide_is_met(total: int, seed: int) -> None:
    """Two layers of three heads: what is left over goes to the lower layer, or to the pyramids of the lower heads."""
    scores = Scores(np.random.default_rng(seed).random((6, 20)), np.arange(21), heads=3)
    for budgets in (Adaptive(Fraction(1, 5)), Competition(Fraction(1, 5))):
        assert budgets(total, scores).reshape(2, 3).sum(axis=1).tolist() == [total - total // 2, total // 2]
    by_head = Pyramid(2)(total, scores).reshape(2, 3).sum(axis=0)
    assert by_head.tolist() == oracle.whole([Fraction(total, 3)] * 3)


@pytest.mark.spec("PO-PYRAMID-OFFICIAL")
@pytest.mark.parametrize(("L", "total", "first", "last"), [(32, 4016, 234, 17), (80, 12400, 234, 76)])
def test_the_official_pyramid_overspends(L: int, total: int, first: int, last: int) -> None:
    """At 128 tokens and a window of 8: 4.6 % over for 32 layers, 29.2 % for 80; ours is exact."""
    shares = pyramidkv_official(128, 8, L, 4096)
    assert (shares[0] - 8, shares[-1] - 8, shares.sum() - 8 * L) == (first, last, total)
    ours = Pyramid(8)(128 * L, Scores(np.zeros((L, 4096)), np.arange(4097)))
    assert ours.sum() == 128 * L


@pytest.mark.spec("PO-PYRAMID-OFFICIAL")
@given(L=st.integers(2, 80), capacity=st.integers(9, 300), n=st.integers(1, 900))
@example(L=2, capacity=108, n=200)  # n = 2 base is no longer below it
@example(L=2, capacity=12, n=12)  # nor is n = capacity
def test_how_far_the_official_pyramid_misses(L: int, capacity: int, n: int) -> None:
    """Never under; flat below 2 (capacity - W) tokens; over by what the floored step leaves, L (L - 1) / 2 at most."""
    base = capacity - 8
    shares = pyramidkv_official(capacity, 8, L, n)
    if n < max(capacity, 2 * base):
        assert shares.tolist() == [min(n, capacity)] * L
        return
    low = base // 20
    high = 2 * base - low if 2 * base - low < n - 8 else n - 8
    spread = high - (2 * base - high)
    assert shares.tolist() == [8 + high - layer * (spread // (L - 1)) for layer in range(L)]
    excess = Fraction(int(shares.sum())) - L * capacity
    assert excess == Fraction(L * (spread % (L - 1)), 2)
    assert 0 <= excess <= Fraction(L * (L - 1), 2)


@pytest.mark.spec("PO-ADAKV-OFFICIAL")
@pytest.mark.parametrize(
    ("wins", "base", "share", "expected"),
    [
        ([101, 101], 101, Fraction(1, 2), [100, 100]),
        ([101, 101, 101, 101], 101, Fraction(1, 2), [100, 100, 100, 100]),
        ([1, 3], 2, Fraction(1, 2), [2, 2]), ([3, 5], 4, Fraction(1, 2), [4, 4]),
        ([0, 10], 5, Fraction(1, 5), [1, 9]), ([4, 8], 6, Fraction(1, 5), [4, 7]),
    ],
)
def test_the_official_rounding_misses(wins: list[int], base: int, share: Fraction, expected: list[int]) -> None:
    """A base of 101 with a safeguard of a half gives 100 where nothing should go; halves go to the even number."""
    assert adakv_official(wins, base, share).tolist() == expected


@pytest.mark.spec("PO-RETAIN", "PO-TOP-UNITS", "PO-FILL-UNITS")
@pytest.mark.parametrize("name", CASES)
def test_positions_are_int64_and_scores_float64(name: str) -> None:
    """float32 counts to 2^24 only, and int32 is not what a caller was promised."""
    inputs = drawn(7, n=12, L=2, heads=(2, 1))
    policy = CASES[name].policy(inputs)
    found = retained(policy, inputs, 6)
    assert {found.positions.dtype, found.offsets.dtype} == {np.dtype(np.int64)}
    scores = policy.scorer(replace(observation(policy, inputs), B=6), policy.protection(inputs.n))
    assert scores.values.dtype == np.float64
    assert scores.offsets.dtype == np.int64


@pytest.mark.spec("CC-PROTECTED")
def test_places_join_what_another_protection_marks() -> None:
    """Those that have been seen; the other protection's own array stays as it was."""
    alone = SinkAndRecent(1, 1)
    assert Places(alone, (2, 5, 7))(5).tolist() == [True, False, True, False, True]
    assert Places(alone, (2, 5))(6).tolist() == [True, False, True, False, False, True]


@pytest.mark.spec("PO-RETAIN")
def test_one_share_below_the_protected_tokens_is_refused() -> None:
    """Four groups of 6 protected tokens: one of them is given 5, and another 7."""
    inputs = drawn(5, n=20, L=2, heads=(2, 1))
    for shares in ([5, 7, 6, 6], [6, 6, 7, 5]):
        policy = replace(
            keydiff(), protection=SinkAndRecent(2, 4),
            budgets=lambda total, scores, shares=shares: np.array(shares),
        )
        with pytest.raises(SpecError, match="must be at least 6, the number of tokens that keydiff protects"):
            decided(policy, inputs, 6)
