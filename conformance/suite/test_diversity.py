"""Tests of set-conditioned selection: Algorithm 1 with all ties, cosines and signatures."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks.refusals import refused
from conformance.oracles import diversity as brute
from conformance.oracles.scale import selectors as scale
from conformance.strategies.numbers import CLOSE, SPECIAL, close, seeds
from reference import diversity
from spec.backend import DiversityStages


@st.composite
def selections(draw: st.DrawFn) -> tuple[Any, Any, Any, int, float]:
    """Draw inputs with few directions and few scores, so that equal vectors and ties are common.

    Some scores are missing or infinite.
    """
    seed, n, d = draw(seeds), draw(st.integers(1, 24)), draw(st.integers(1, 6))
    rng = np.random.default_rng(seed)
    kinds = rng.standard_normal((draw(st.integers(1, 4)), d)) if draw(st.booleans()) else rng.integers(-1, 2, (4, d))
    V = kinds[rng.integers(0, len(kinds), n)].astype(np.float64)
    V = diversity.unit_rows(V) if draw(st.booleans()) else V
    s = rng.integers(0, 4, n) / 4 if draw(st.booleans()) else rng.standard_normal(n)
    s = np.where(rng.random(n) < draw(st.sampled_from([0.0, 0.2])), rng.choice([np.nan, np.inf, -np.inf], n), s)
    retained = rng.random(n) < draw(st.sampled_from([0.0, 0.3]))
    k = draw(st.integers(int(retained.sum()), n))
    for x in (s, V, retained):
        x.setflags(write=False)
    return s, V, retained, k, draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 3.0]))


@pytest.mark.spec("DV-GREEDY", "DV-COSINE")
@given(given_=selections())
def test_the_sets_are_those_of_algorithm_1(selector: DiversityStages, given_: tuple[Any, Any, Any, int, float]) -> None:
    """Equal gains MUST go to the lower position, for any form of the implementation."""
    s, V, retained, k, lam = given_
    actual = selector.diverse(s, V, retained, k, lam)
    assert actual.tolist() == brute.alpha(s.tolist(), V.tolist(), np.flatnonzero(retained).tolist(), k, lam)


UP, RIGHT, LEFT, NAN = [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0], float("nan")


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize(
    ("s", "V", "lam", "kept"),
    [
        ([1.0, 0.9, 0.8], [RIGHT, RIGHT, UP], 0.5, [0, 2]), ([1.0, 0.9, 0.8], [RIGHT, RIGHT, UP], 0.0, [0, 1]),
        ([1.0, 0.875, 0.75], [RIGHT, RIGHT, UP], 0.125, [0, 1]), ([1.0, 0.5, 0.5], [RIGHT, UP, LEFT], 0.5, [0, 1]),
        ([0.5, 1.0, 0.5], [LEFT, RIGHT, UP], 0.5, [0, 1]), ([1.0, 0.5, 0.25], [RIGHT, UP, LEFT], 4.0, [0, 1]),
        ([NAN, 0.5, 0.25], [RIGHT, UP, LEFT], 0.5, [1, 2]), ([NAN, NAN, 0.25], [RIGHT, UP, LEFT], 0.5, [0, 2]),
        ([0.5, 1.0, 0.5], [LEFT, RIGHT, UP], 0.0, [0, 1]), ([1.0, 0.9, 0.8], [RIGHT, [0.0, 0.0], UP], 0.5, [0, 1]),
        ([0.5, float("inf"), 0.25], [RIGHT, RIGHT, UP], 0.5, [1, 2]),
        ([float("-inf"), NAN, 0.25], [RIGHT, UP, LEFT], 0.5, [0, 2]),
        ([NAN, -1e300, -1.7e308], [RIGHT, UP, LEFT], 0.5, [1, 2]),
    ],
)
def test_two_of_three(
    selector: DiversityStages, s: list[float], V: list[list[float]], lam: float, kept: list[int],
) -> None:
    """Check copies, ties, opposite directions and missing scores.

    A copy of a kept token is selected later, and a tie goes to the lower position. An opposite direction MUST NOT get
    a bonus, and NaN is last.
    """
    actual = selector.diverse(np.array(s), np.array(V), np.zeros(3, dtype=np.bool_), 2, lam)
    assert actual.tolist() == kept


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize("kind", [*CLOSE, *SPECIAL])
@pytest.mark.parametrize("n", [2, 40, 150, 1_100])
def test_close_and_missing_scores_are_told_apart(selector: DiversityStages, n: int, kind: str) -> None:
    """Check adjacent float64 numbers of any size, subnormal and huge ones included. -0.0 and 0.0 are equal.

    A missing score ranks below all finite scores. Among missing scores, the lower position is first.
    """
    s, V, none = close(kind, n, n), np.tile([UP, RIGHT], (n, 1))[:n], np.zeros(n, dtype=np.bool_)
    for k, lam in ((1, 0.0), (1, 0.5), (n // 2, 0.0), (min(n, 9), 0.5)):
        assert np.array_equal(selector.diverse(s, V, none, k, lam), scale.diverse(s, V, none, k, lam))


@pytest.mark.spec("DV-GREEDY", "DV-COSINE")
@pytest.mark.parametrize("n", [3, 40, 150, 1_100, 2_300])
def test_close_signatures_are_told_apart(selector: DiversityStages, n: int) -> None:
    """Check equal scores and cosines with the retained token that differ by 2^-40: the smallest cosine is selected."""
    V = np.ones((n, 2))
    V[1:, 0] = 1 - 2.0**-40 * (1 + np.random.default_rng(n).permutation(n - 1))
    retained, k = np.arange(n) == 0, min(n - 1, 5)
    actual = selector.diverse(np.ones(n), V, retained, k, 0.5)
    assert np.array_equal(actual, scale.diverse(np.ones(n), V, retained, k, 0.5))


@pytest.mark.spec("DV-COSINE", "DV-GREEDY")
@pytest.mark.parametrize(("first", "second", "third"), [
    ([1.0] * 24, [1 + 2.0**-52], [1.0] + [2.0**-53] * 23),
    ([1.0, 1 + 2.0**-27], [1 + 2.0**-52, 2.0**-53 - 2.0**-80], [1 + 2.0**-52]),
], ids=["order", "rounded products"])
@pytest.mark.parametrize("n", [3, 300])
def test_products_are_added_in_the_order_of_channels(
    selector: DiversityStages, n: int, first: list[float], second: list[float], third: list[float],
) -> None:
    """Check that the third token is selected, whose cosine with the first is smaller by an ulp.

    None of 23 products of 2^-53 changes a sum of 1, but the sum of the products does. A fused multiply-add has a
    smaller product than a rounded one.
    """
    close_pair = np.array([[1.0, 1.0], [1 - 2.0**-40, 1.0], [1 - 2.0**-39, 1.0]])
    separable = selector.diverse(np.ones(3), close_pair, np.arange(3) < 1, 2, 0.5).tolist() == [0, 2]
    assert separable, "signatures or scores are rounded below float64, as in float32: check that before the order"
    rows = [first, *[second, third] * n]
    V = np.array([row + [0.0] * (24 - len(row)) for row in rows[:n]])
    assert selector.diverse(np.ones(n), V, np.arange(n) < 1, 2, 0.5).tolist() == [0, 2]


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize("lam", [0.01, 0.02, 0.07, 0.3])
def test_what_redundancy_costs_is_rounded(selector: DiversityStages, lam: float) -> None:
    """Check that the product of lam and the cosine 0.03 is rounded, so that the gains of tokens 1 and 2 are both 0.

    The lower position is then selected. A fused multiply-add keeps the lower bits of the product, so the gain is below
    0 for some lam.
    """
    s, V = np.array([1.0, lam * 0.03, 0.0]), np.array([[1.0, 0.0], [0.03, 0.0], [0.0, 1.0]])
    assert selector.diverse(s, V, np.zeros(3, dtype=np.bool_), 2, lam).tolist() == [0, 1]


@pytest.mark.spec("DV-GREEDY")
def test_the_retained_alone_are_kept(selector: DiversityStages) -> None:
    """Check that k retained tokens are kept even if they have the lowest scores and equal vectors."""
    retained = np.array([True, False, True])
    actual = selector.diverse(np.array([0.25, 1.0, 0.0]), np.array([UP, RIGHT, UP]), retained, 2, 0.5)
    assert actual.tolist() == [0, 2]


@pytest.mark.spec("DV-GREEDY", "DV-COSINE")
def test_larger_sets_are_those_of_algorithm_1(selector: DiversityStages) -> None:
    """Check 150 of 300 clustered tokens, which are several panels if an implementation stores signatures in panels."""
    rng = np.random.default_rng(8)
    V = diversity.unit_rows(rng.standard_normal((9, 6))[rng.integers(0, 9, 300)] + 0.1 * rng.standard_normal((300, 6)))
    s, retained = rng.standard_normal(300), np.arange(300) < 3
    actual = selector.diverse(s, V, retained, 150, 0.5)
    assert actual.tolist() == brute.alpha(s.tolist(), V.tolist(), [0, 1, 2], 150, 0.5)


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize("held", [65, 130])
def test_more_retained_tokens_than_a_panel(selector: DiversityStages, held: int) -> None:
    """The last retained token MUST count as kept from the first choice on. It equals the best candidate."""
    V = np.array([LEFT] * (held - 1) + [UP, UP] + [RIGHT] * 9)
    actual = selector.diverse(np.arange(len(V), 0.0, -1.0), V, np.arange(len(V)) < held, held + 1, 1e3)
    assert actual.tolist() == [*range(held), held + 1]


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"lam": -0.5}, "lam"), ({"lam": float("nan")}, "lam"), ({"lam": float("inf")}, "lam"), ({"k": 4}, "k"),
        ({"k": 1, "retained": np.array([True, True, False])}, "k"), ({"V": np.ones((2, 2))}, "V"),
        ({"V": np.array([[1.0, 0.0], [np.nan, 0.0], [0.0, 1.0]])}, "V"),
        ({"V": np.array([[1.0, 0.0], [np.inf, 0.0], [0.0, 1.0]])}, "V"),
    ],
)
def test_a_selection_that_is_not_admitted_is_refused(
    selector: DiversityStages, change: dict[str, Any], argument: str,
) -> None:
    good = {"s": np.arange(3.0), "V": np.eye(3, 2), "retained": np.zeros(3, dtype=np.bool_), "k": 2, "lam": 0.5}
    given_: dict[str, Any] = {**good, **change}
    with refused(argument, given_[argument]):
        selector.diverse(*given_.values())


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 2, 33, 257, 1_025])
def test_signatures_are_refused_where_nothing_is_chosen(selector: DiversityStages, n: int, value: float) -> None:
    """Check that a bad signature in any row is refused, also if the selection does not read signatures.

    This is so if all tokens, no tokens or only retained tokens are kept, or if lam is 0.
    """
    calls = ((n, 0, 0.5), (0, 0, 0.5), (n, n, 0.5), (1, 1, 0.5), (1, 0, 0.0))
    for row, (k, held, lam) in product((0, n // 2, n - 1), calls):
        V = np.ones((n, 2))
        V[row, -1] = value
        with refused("V", V):
            selector.diverse(np.ones(n), V, np.arange(n) < held, k, lam)
