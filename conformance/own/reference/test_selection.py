"""Budgets and selectors on given scores: exact totals, published misses, ties."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.assurance.policy_cases import CASES
from conformance.methods import policies as oracle
from conformance.strategies.policy_inputs import decided, drawn, observation, retained
from reference.policies import keydiff
from reference.policies.budgets import (
    Adaptive,
    Competition,
    Pyramid,
    adakv_official,
    even,
    largest_remainder,
    pyramidkv_official,
    winners,
)
from reference.policies.protections import Places, SinkAndRecent
from reference.policies.selectors import fill_units, top_units
from spec.errors import SpecError
from spec.policy import Scores

pytestmark = pytest.mark.usefixtures("reference_items")

Rows = list[list[float]]


@st.composite
def layers(draw: st.DrawFn) -> tuple[Rows, int, int, int]:
    """Scores of small integers, so that ties are common; heads of a layer, protected last tokens, B."""
    L, H, n = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 14))
    pinned = draw(st.integers(0, n))
    row = st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n)
    rows = draw(st.lists(row, min_size=L * H, max_size=L * H))
    return rows, H, pinned, draw(st.integers(max(1, pinned), n + 2))


def scores_of(rows: Rows, H: int, pinned: int) -> tuple[Scores, np.ndarray]:
    values = np.array(rows)
    values[:, values.shape[1] - pinned :] = np.nan
    return Scores(values, np.arange(values.shape[1] + 1), heads=H), np.isnan(values[0])


def padded(rows: Rows, pinned: int) -> list[oracle.Score]:
    return [[*row[: len(row) - pinned], *[None] * pinned] for row in rows]


@pytest.mark.spec("PO-TOP-UNITS")
@given(given_=layers())
def test_top_units_keeps_the_protected_then_the_highest(given_: tuple[Rows, int, int, int]) -> None:
    """Equal scores: the lower position MUST stay."""
    rows, H, pinned, B = given_
    scores, protected = scores_of(rows, H, pinned)
    found = top_units(scores, even(B * len(rows), scores), protected)
    kept = [found.positions[a:b].tolist() for a, b in pairwise(found.offsets)]
    assert kept == [oracle.top(row, B) for row in padded(rows, pinned)]


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


@pytest.mark.spec("PO-FILL-UNITS")
@given(given_=layers(), c=st.integers(1, 5))
def test_fill_units_takes_the_last_unit_in_part(given_: tuple[Rows, int, int, int], c: int) -> None:
    rows, H, pinned, B = given_
    scores, protected = scores_of(rows, H, pinned)
    n = len(protected)
    past = n - pinned
    offsets = np.array([*range(0, past, c), *([past] if pinned else []), n])
    totals = np.array([np.add.reduceat(np.array(row), offsets[:-1]) for row in rows])
    totals[:, totals.shape[1] - bool(pinned) :] = np.nan
    chunked = Scores(totals, offsets, scores.values)
    found = fill_units(chunked, even(B * len(rows), scores), protected)
    kept = [found.positions[a:b].tolist() for a, b in pairwise(found.offsets)]
    assert kept == [oracle.chunk_selection(row, c, B) for row in padded(rows, pinned)]


@pytest.mark.spec("PO-WHOLE-SHARES")
@given(parts=st.lists(st.integers(0, 40), min_size=1, max_size=8), divisor=st.integers(1, 7))
def test_largest_remainder_sums_exactly(parts: list[int], divisor: int) -> None:
    """Each share is its target rounded down or up; the sum MUST be the targets' sum; lower index first."""
    parts[0] += -sum(parts) % divisor
    targets = [Fraction(part, divisor) for part in parts]
    shares = largest_remainder(targets)
    assert shares.sum() == sum(targets)
    assert shares.tolist() == oracle.whole(targets)


@pytest.mark.spec("PO-PYRAMID-BUDGET")
@given(
    L=st.integers(1, 40), n=st.integers(1, 400), W=st.integers(1, 20), B=st.integers(1, 420), beta=st.integers(1, 30),
    H=st.integers(1, 3),
)
def test_a_pyramid_meets_its_total(L: int, n: int, W: int, B: int, beta: int, H: int) -> None:
    """MUST hold B tokens on average, none above n, none below the window, and never more in a higher layer."""
    B, W = max(B, W), min(W, n)
    scores = Scores(np.zeros((L * H, n)), np.arange(n + 1), heads=H)
    shares = Pyramid(W, beta)(B * L * H, scores).reshape(L, H)
    assert shares.sum() == L * H * min(B, n)
    assert (shares <= n).all()
    assert (shares >= W).all()
    assert (np.diff(shares, axis=0) <= 0).all()
    assert shares.T.tolist() == [oracle.pyramid_shares(Fraction(B), W, L, n, beta)] * H


@pytest.mark.parametrize(("budgets", "brute"), [
    pytest.param(Adaptive, oracle.adaptive_shares, marks=pytest.mark.spec("PO-ADAPTIVE-BUDGET")),
    pytest.param(Competition, oracle.competition_shares, marks=pytest.mark.spec("PO-COMPETITION-BUDGET")),
])
@given(given_=layers(), twentieths=st.integers(0, 20))
def test_shares_of_heads_that_compete(
    budgets: type[Adaptive | Competition], brute: Any, given_: tuple[Rows, int, int, int], twentieths: int,
) -> None:
    """Exact per layer: a blend of wins and even share; or wins, where each head MUST have its quota of the budget."""
    rows, H, pinned, B = given_
    scores, _ = scores_of(rows, H, pinned)
    a = Fraction(twentieths, 20)
    shares = budgets(a)(B * len(rows), scores)
    masked = padded(rows, pinned)
    wanted = [brute(masked[at : at + H], B, a) for at in range(0, len(rows), H)]
    assert shares.reshape(-1, H).tolist() == wanted
    assert budgets is Adaptive or (shares >= min(int(a * B), len(rows[0]))).all()
    assert (shares.reshape(-1, H).sum(axis=1) == H * min(B, len(rows[0]))).all()


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET")
def test_the_lower_head_and_position_wins_a_tie() -> None:
    """Four scores of 1 compete for two places below a 2; a token without a score has none."""
    found = winners(np.array([[1.0, 1.0], [2.0, 1.0], [np.nan, 1.0]]), 3)
    assert found.tolist() == [2, 1, 0]
    assert found.dtype == np.int64
    assert winners(np.array([[np.nan, 1.0], [np.nan, 0.0]]), 2).tolist() == [1, 1]
    assert winners(np.tile([0.0, 1.0], (3, 200)), 450).tolist() == [200, 200, 50]


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET")
def test_the_two_safeguards_differ() -> None:
    """The same scores: a quota gives [7, 1], a blend [6, 2]; kvpress reads the safeguard as a quota. 1 is even."""
    rows = [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], [1.0] + [0.0] * 7]
    scores, _ = scores_of(rows, 2, 0)
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
