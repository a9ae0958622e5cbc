"""Statistics compared with values by hand and with scipy, tables and errata of the papers, the diversity protocol."""

import hashlib
import math
from itertools import product
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.paths import SPEC
from reference.confirmation import BONFERRONI, Cell, branch_of, choose_lambda, paired_difference, split_of
from reference.injection.fusion import fused
from reference.statistics import (
    bootstrap,
    cluster_bootstrap,
    draws,
    mcnemar,
    mcnemar_power,
    ratio_bootstrap,
    sign_flip,
    stratified_draws,
    wilson,
)
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")


DIFFERENCES = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=6)


@pytest.mark.spec("IN-MCNEMAR")
@pytest.mark.parametrize(
    ("b", "c", "published"),
    [(35, 61, 0.0103), (14, 25, 0.108), (21, 36, 0.063), (11, 6, 0.332), (7, 7, 1.0), (5, 6, 1.0)],
)
def test_the_paper_s_tables(b: int, c: int, published: float) -> None:
    digits = len(str(published).partition(".")[2])
    assert round(mcnemar(b, c), digits) == published


@pytest.mark.spec("IN-WILSON")
def test_wilson_never_leaves_the_shares() -> None:
    """Due to rounding, 135 of the counts up to 300 once had an end below 0 or above 1."""
    for n in range(1, 301):
        for confidence in (1e-17, 0.5, 0.95, 1 - 2**-53):
            assert wilson(0, n, confidence)[0] == 0.0
            assert wilson(n, n, confidence)[1] == 1.0
            for correct in {0, 1, n // 2, n - 1, n}:
                low, high = wilson(correct, n, confidence)
                assert 0 <= low <= correct / n <= high <= 1


@pytest.mark.spec("IN-WILSON", "IN-BOOTSTRAP", "IN-CLUSTER-BOOTSTRAP")
@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 1.5, 95.0, math.nan, math.inf])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float) -> None:
    differences, drawn = np.array([1.0]), np.zeros((3, 1), dtype=np.int64)
    for run in (
        lambda: wilson(1, 2, confidence), lambda: bootstrap(differences, drawn, confidence),
        lambda: cluster_bootstrap(differences, drawn[0], drawn, confidence),
    ):
        with pytest.raises(SpecError, match=r"^confidence = .*must lie in \(0, 1\)"):
            run()


@pytest.mark.spec("IN-BOOTSTRAP")
def test_the_merged_pool_has_the_paper_s_lower_end() -> None:
    """35 losses and 61 wins of 467 give [0.015, 0.096]. The paper prints 0.105 as the upper end."""
    differences = np.repeat([-1.0, 1.0, 0.0], [35, 61, 371])
    actual = bootstrap(differences, draws(467, 10_000, 0))
    assert round(actual.low, 3) == 0.015
    assert round(actual.high, 2) == 0.1
    assert actual.positive > 0.99


@pytest.mark.spec("IN-CLUSTER-BOOTSTRAP")
@given(differences=DIFFERENCES, seed=st.integers(0, 99))
def test_clusters_of_one_are_the_paired_bootstrap(differences: list[float], seed: int) -> None:
    n, values = len(differences), np.array(differences)
    drawn = draws(n, 30, seed)
    assert cluster_bootstrap(values, np.arange(n), drawn) == bootstrap(values, drawn)


@pytest.mark.spec("IN-BOOTSTRAP")
def test_draws_are_the_same_for_the_same_seed() -> None:
    assert draws(5, 20, 1).dtype == np.int64
    assert (draws(5, 20, 1) == draws(5, 20, 1)).all()
    assert (draws(5, 20, 1) != draws(5, 20, 2)).any()
    assert set(np.unique(draws(5, 200, 1))) == set(range(5))


@pytest.mark.spec("IN-BOOTSTRAP", "IN-CLUSTER-BOOTSTRAP")
@pytest.mark.parametrize("run", [bootstrap, lambda d, i: cluster_bootstrap(d, np.zeros(1, dtype=np.int64), i)])
def test_no_resample_is_refused(run: object) -> None:
    with pytest.raises(SpecError, match="at least one resample"):
        run(np.array([1.0]), np.empty((0, 1), dtype=np.int64))  # type: ignore[operator]


@pytest.mark.spec("IN-POWER")
def test_power_equals_scipy() -> None:
    """Check that 385 pairs have a power of 64 %, not 80 %, with the paper's discordance."""
    binom = pytest.importorskip("scipy.stats").binom
    m = np.arange(386)
    # This is the smallest k with P(X <= k) >= 0.025. The limit is k - 1, unless equality holds.
    rejecting = binom.ppf(0.025, m, 0.5)
    k = np.where(binom.cdf(rejecting, m, 0.5) <= 0.025, rejecting, rejecting - 1)
    win = (1 + 26 / 96) / 2
    sides = binom.cdf(k, m, win) + binom.sf(m - k - 1, m, win)
    wanted = float((binom.pmf(m, 385, 96 / 467) * sides).sum())
    assert tolerances.close("IN-POWER", [mcnemar_power(385, 96 / 467, 26 / 467)], [wanted])
    assert round(wanted, 2) == 0.64


@pytest.mark.spec("IN-FUSE")
def test_the_constant_of_fusion_is_sixty() -> None:
    assert fused([["a"]]) == [("a", 1 / 61)]


@pytest.mark.law("figures-are-counted-right")
def test_sign_flips_are_those_of_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for seed in range(5):
        differences = np.random.default_rng(seed).normal(0.4, 1, size=9)
        theirs = scipy_stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
        assert round(sign_flip(differences), 12) == round(float(theirs.pvalue), 12)  # These are counts of 512.
    assert sign_flip(np.ones(4)) == 0.125
    for size in (0, 21):
        with pytest.raises(SpecError, match="because all signs are tried"):
            sign_flip(np.ones(size))


@pytest.mark.law("figures-are-counted-right")
def test_every_resample_has_as_many_units_of_each_stratum() -> None:
    strata = np.array([2, 0, 2, 1, 0, 2])
    drawn = stratified_draws(strata, 200, 3)
    assert {tuple(sorted(each)) for each in strata[drawn].tolist()} == {(0, 0, 1, 2, 2, 2)}
    assert len(np.unique(drawn)) == len(strata)
    assert stratified_draws(np.zeros(6, dtype=np.int64), 50, 3).tolist() == draws(6, 50, 3).tolist()
    with pytest.raises(SpecError, match="units = 0"):
        stratified_draws(np.zeros(0, dtype=np.int64), 50, 3)


@pytest.mark.law("figures-are-counted-right")
def test_ratio_bootstrap_by_hand() -> None:
    above, below, clusters = np.array([1.0, 2.0, 4.0]), np.array([2.0, 1.0, 5.0]), np.array([0, 1, 1])
    drawn = np.array(list(product(range(2), repeat=2)))
    ratios = sorted([1 / 2, 7 / 8, 7 / 8, 6 / 6])
    actual = ratio_bootstrap(above, below, clusters, drawn, 0.5)
    assert actual[:2] == (ratios[1], ratios[2])
    assert actual.positive == 1.0


TABLE_2 = {
    "qwen": [Cell(0.0156, -0.0089, 0.0401, 0.20), Cell(0.0479, 0.0167, 0.0792, 0.0022)],
    "llama": [Cell(0.0223, 0.0056, 0.0390, 0.0054), Cell(-0.0022, -0.0245, 0.0201, 0.86)],
}
PASSED = {"qwen": [False, True], "llama": [True, False]}
TABLE_3 = {0.5: (0.5, 4.0, 0.0, -1.5), 1.0: (-1.0, 1.0, 0.0, -2.0), 1.5: (2.5, 1.0, -1.9, 0.0)}
MEANS = {0.5: 0.75, 1.0: -0.50, 1.5: 0.43}
"""Printed means. The mean of the printed cells of the third, which are rounded to 0.1, is 0.40."""


@pytest.mark.law("as-it-is-described")
def test_the_tables_of_the_paper_follow_from_its_rules() -> None:
    assert branch_of(TABLE_2["qwen"], TABLE_2["llama"]) == "A"
    assert {name: [cell.p < BONFERRONI for cell in cells] for name, cells in TABLE_2.items()} == PASSED
    assert round(100 * fmean(cell.difference for cell in TABLE_2["llama"]), 3) == 1.005  # "+1.00 pp"
    assert choose_lambda({one: [cell / 100 for cell in cells] for one, cells in TABLE_3.items()}) == 0.5
    assert all(abs(fmean(cells) - MEANS[one]) <= 0.05 for one, cells in TABLE_3.items())


def asymptotic(lost: int, won: int) -> float:
    """Return McNemar's p from the chi-squared distribution with one degree of freedom."""
    return math.erfc(abs(won - lost) / math.sqrt(2 * (won + lost)))


def interval(lost: int, won: int, n: int) -> tuple[float, float]:
    """Return the normal interval of a mean of paired differences."""
    mean = (won - lost) / n
    half = 1.96 * math.sqrt(((won + lost) / n - mean**2) / n)
    return round(mean - half, 3), round(mean + half, 3)


def paired(points: float, n: int) -> bool:
    """Return whether `points` is a possible difference of right answers on n problems, to one decimal."""
    return any(round(100 * k / n, 1) == points for k in range(-n, n + 1))


def apart(points: float, right: int, n: int, baseline: int = 201) -> list[int]:
    """Return the numbers of right answers of n with a difference of `points` percentage points from the baseline."""
    return [k for k in range(n + 1) if round(100 * (k / n - right / baseline), 1) == points]


RECOMPUTED = {
    "I1": ([3 / 15, round(2 / 11, 2)], [0.20, 0.18]),
    "I2": ([15 / 3], [5.0]),
    "I3": ([round(0.5625 - 0.5375, 4), round(0.5625 - 0.5500, 4)], [0.025, 0.0125]),
    "I4": ([(41 - 40) / 80, (39 - 40) / 80, round(41 / 80, 3), round(39 / 80, 3)], [0.0125, -0.0125, 0.512, 0.487]),
    "I5": ([*interval(35, 61, 467)], [0.015, 0.096]),
    "I6": ([round(mcnemar(35, 61), 4)], [0.0103]),
    "I7": (
        [round(f(b, c), 4) for b, c in [(9, 23), (8, 22)] for f in (asymptotic, mcnemar)],
        [0.0133, 0.0201, 0.0106, 0.0161],
    ),
    "I8": ([round(mcnemar_power(385, 96 / 467, 26 / 467), 2)], [0.64]),
    "I9": ([4096 * 28 * 4 * 128 * 2 * 2 / 2**20], [224.0]),
    "S1": (sorted(TABLE_3, key=lambda lam: -TABLE_3[lam][3]), [1.5, 0.5, 1.0]),
    "S2": (
        [paired(1.0, 164), paired(-1.9, 196), apart(1.0, 31, 164), apart(-1.9, 15, 196),
         round(25 * (21 / 200 - 16 / 201 + 27 / 164 - 31 / 201 + 11 / 196 - 15 / 201), 2),
         round(fmean(TABLE_3[1.5]), 2)],
        [False, False, [27], [11], 0.43, 0.40],
    ),
}
"""Recomputed numbers of errata of the injection and the diversity paper.

Table 3 has all problems only in its last cell.
"""


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("erratum", RECOMPUTED)
def test_an_erratum_recomputes_and_is_listed(erratum: str) -> None:
    actual, wanted = RECOMPUTED[erratum]
    assert actual == wanted
    assert f"| {erratum} |" in (SPEC / "errata.md").read_text(encoding="utf-8")


@pytest.mark.law("figures-are-counted-right")
def test_no_counts_give_both_p_values_of_phi_3() -> None:
    """Check that no numbers of lost and won pairs give both p values: 0.013, and the exact 0.019."""
    lost = [b for b in range(93) if round(asymptotic(b, b + 14), 3) == 0.013]
    assert lost == [9]
    assert [b for b in lost if round(mcnemar(b, b + 14), 3) == 0.019] == []


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(
    ("first", "second", "branch"),
    [
        ([(0.05, 0.01)], [(0.01, 0.5), (-0.01, 0.5)], "B"),  # A mean of 0 is not positive.
        ([(0.05, 0.01)], [(0.09, 0.01), (-0.01, 0.04)], "B"),
        ([(0.05, 0.01)], [(0.09, 0.01), (-0.01, 0.05)], "A"),
        ([(0.05, 0.05)], [(0.09, 0.01)], "C"),
        ([(-0.05, 0.01)], [(0.09, 0.01)], "C"),
        ([(0.05, 0.01), (-0.05, 0.01)], [(0.09, 0.9)], "A"),  # The guard applies only to the second model.
    ],
)
def test_a_branch_turns_at_its_conditions(
    first: list[tuple[float, float]], second: list[tuple[float, float]], branch: str,
) -> None:
    cells = [[Cell(difference, math.nan, math.nan, p) for difference, p in each] for each in (first, second)]
    assert branch_of(*cells) == branch


@pytest.mark.law("as-it-is-described")
def test_a_tie_goes_to_the_smaller_lambda() -> None:
    assert choose_lambda({1.0: [0.02, 0.0], 0.5: [0.01, 0.0]}) == 0.5
    assert choose_lambda({1.0: [0.02, 0.0], 0.5: [0.009, 0.0]}) == 1.0


@pytest.mark.law("as-it-is-described")
def test_two_of_five_problems_are_for_development() -> None:
    """Compute the MD5 as a number by hand, from its bytes in big-endian order."""
    names = [f"test/algebra/{number}.json" for number in range(500)]
    for name in names:
        rest = 0
        for byte in hashlib.md5(name.encode()).digest():
            rest = (rest * 256 + byte) % 5
        assert split_of(name) == ("dev" if rest in (0, 1) else "confirm")
    assert 160 < sum(split_of(name) == "dev" for name in names) < 240


@pytest.mark.law("as-it-is-described")
def test_a_paired_difference_has_the_p_of_all_resamples() -> None:
    """Check three problems of two seeds: all 27 resamples by hand, compared with many drawn resamples."""
    differences, problems = np.array([1.0, 1.0, 1.0, 0.0, -1.0, 0.0]), np.array([0, 0, 1, 1, 2, 2])
    sums = [2.0, 1.0, -1.0]
    means = [fmean(sums[at] / 2 for at in drawn) for drawn in product(range(3), repeat=3)]
    below, above = (sum(sign * mean >= 0 for mean in means) / len(means) for sign in (-1, 1))
    cell = paired_difference(differences, problems, resamples=20_000, seed=1)
    assert math.isclose(cell.difference, 1 / 3)
    assert abs(cell.p - 2 * min(below, above)) < 0.02
    assert paired_difference(-differences, problems, resamples=20_000, seed=1).p == cell.p
    assert paired_difference(np.ones(4), np.arange(4), resamples=500).p == 2 / 500
    assert paired_difference(np.zeros(4), np.arange(4), resamples=500).p == 1


@pytest.mark.law("refused-before-anything-changes")
def test_nothing_is_decided_of_nothing() -> None:
    cells = [Cell(0.1, 0.0, 0.2, 0.01)]
    for refused, reason in (
        (lambda: branch_of([], cells), "first = "), (lambda: branch_of(cells, []), "second = "),
        (lambda: choose_lambda({}), "differences = "), (lambda: choose_lambda({0.5: []}), "differences = "),
        (lambda: paired_difference(np.empty(0), np.empty(0, dtype=np.int64)), "differences = 0"),
    ):
        with pytest.raises(SpecError, match=reason):
            refused()
