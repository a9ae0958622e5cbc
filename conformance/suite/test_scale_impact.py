"""S3 and S5 at full size: ids of any width, counts of any size, extremes anywhere among many trunks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.oracles.scale import stages as oracle
from conformance.strategies.scale_numbers import Numbers
from spec.arrays import IntVector
from spec.backend import BreathStages, CrystalStages
from spec.parameters import PAPER

pytestmark = pytest.mark.usefixtures("compiled")

# Two ids of each row are one number in a type or a table of that width.
ALIKE = {
    "uint8": [3, 3 + 2**8], "table-of-1024": [5, 5 + 1_024], "uint16": [1, 65_537], "int16": [7, 7 + 2**15],
    "float32": [2**24, 2**24 + 1], "int32": [11, 11 + 2**31], "uint32": [9, 9 + 2**32], "float64": [2**53, 2**53 + 1],
    "int64": [2**62, 2**62 + 1], "a-million": [13, 1_000_013], "a-prime": [17, 17 + 2**31 - 1],
}


def right(stages: CrystalStages, ids: Any, form: str = "mixture") -> bool:
    ids = np.asarray(ids, dtype=np.int64)
    S = 0.1 + 19 * Numbers(2).fractions(len(ids))
    p = replace(PAPER, impact=form)  # type: ignore[arg-type]
    return tolerances.close("CC-IMPACT", stages.impact(S, ids, p), oracle.token_impact(S, oracle.counts(ids), p))


@pytest.mark.spec("CC-COUNT")
@pytest.mark.parametrize("width", ALIKE)
def test_ids_that_a_width_takes_for_one(stages: CrystalStages, width: str) -> None:
    a, b = ALIKE[width]
    assert right(stages, [a, b, 8, 8])
    assert right(stages, [b, a, b, b, a, 8, a, b] * 20)


@pytest.mark.spec("CC-COUNT")
@pytest.mark.parametrize("n", [
    16, 17, 32, 33, 41, 64, 65, 128, 129, 255, 256, 257, 1_024, 1_025, 65_535, 65_536, 65_537,
])
def test_one_id_so_often(stages: CrystalStages, n: int) -> None:
    """The first and the last token's ids occur once; all others are one."""
    assert right(stages, [4, *[6] * n, 5])


@pytest.mark.spec("CC-COUNT")
@pytest.mark.parametrize("vocabulary", [16, 32_000, 65_536, 151_936, 2**24, 2**31, 2**33, 2**62])
def test_ids_of_a_vocabulary(stages: CrystalStages, vocabulary: int) -> None:
    """100 000 tokens, the frequent ones first; and as many that differ."""
    u = Numbers(vocabulary).fractions(100_000)
    assert right(stages, (vocabulary * u**6).astype(np.int64))
    assert right(stages, np.arange(0, vocabulary, max(1, vocabulary // 70_000))[:100_000])


@pytest.mark.spec("CC-IMPACT")
@pytest.mark.parametrize("form", ["mixture", "salience", "uniform"])
@pytest.mark.parametrize("n", [17, 33, 65, 129, 257, 1_025, 65_537])
def test_impact_of_every_token(stages: CrystalStages, form: str, n: int) -> None:
    assert right(stages, np.arange(n) % 700, form)


@pytest.mark.spec("CC-UNIT-IMPACT")
@pytest.mark.parametrize("n", [17, 33, 65, 129, 257, 1_025, 65_537])
def test_the_largest_salience_may_be_the_last(stages: CrystalStages, n: int) -> None:
    p, ids = replace(PAPER, impact="unit"), np.arange(n) % 97
    for at in (n - 1, n // 2, 0):
        S = Numbers(n).fractions(n)
        S[at] = 3.0
        assert tolerances.close("CC-IMPACT", stages.impact(S, ids, p), oracle.token_impact(S, oracle.counts(ids), p))


def widths() -> IntVector:
    """Counts up to 300 and on either side of every power of two up to 2^40."""
    edges = [2**e + step for e in range(8, 41) for step in (-1, 0, 1)]
    return np.array([*range(1, 301), *edges], dtype=np.int64)


@pytest.mark.spec("CC-RARITY", "CC-COUNT")
@pytest.mark.parametrize("M_max", [20.0, 0.5])
def test_rarity_of_any_count(breath_stages: BreathStages, M_max: float) -> None:
    """Of given counts, which need no tokens: M = M_max (S / M_max + U) / 2."""
    c, p = np.tile(widths(), 200), replace(PAPER, M_max=M_max, M_min=0.0)  # 80 000 of them
    S = np.full(len(c), 0.125)
    assert tolerances.close("CC-IMPACT", breath_stages.impact(S, c, p), oracle.token_impact(S, c, p))


@pytest.mark.spec("CC-RARITY-FORMS")
@pytest.mark.parametrize("form", ["reciprocal", "exponential"])
def test_rarity_forms_of_any_count(breath_stages: BreathStages, form: str) -> None:
    c, p = widths(), replace(PAPER, rarity=form, M_min=0.0)  # type: ignore[arg-type]
    S = np.zeros(len(c))
    found, want = breath_stages.impact(S, c, p), oracle.token_impact(S, c, p)
    far = want < 1e-290  # exp(-700): below it results are rounded to less than 53 bits
    assert tolerances.close("CC-IMPACT", found[~far], want[~far])
    assert (found[far] < 1e-280).all()


@pytest.mark.nightly
@pytest.mark.spec("CC-COUNT")
def test_more_tokens_than_float32_counts(stages: CrystalStages) -> None:
    """2^24 + 3 tokens of one id: about 2 GB."""
    assert right(stages, np.full(2**24 + 3, 7))


def trunks_of(m: int, seed: int) -> tuple[Any, Any, Any]:
    numbers = Numbers(seed)
    return numbers.fractions(m) * 0.25, 1 + 9 * numbers.fractions(m), numbers.integers(0, 9, m) == 0


def radius(M_bar: Any, alpha: float) -> float:
    return alpha * tolerances.normalised_radius(M_bar.tolist(), PAPER.epsilon)


TRUNKS = [15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1_025, 65_537, 100_000]


@pytest.mark.spec("CC-NORMALISED-IMPACT")
@pytest.mark.parametrize("m", TRUNKS)
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_extremes_anywhere(stages: CrystalStages, m: int, at: str) -> None:
    """The least and the greatest impact stand side by side; greater ones are protected and do not count."""
    D, M_bar, shut = trunks_of(m, m)
    place = {"first": 0, "middle": m // 2, "last": m - 2}[at]
    M_bar[[place, place + 1]] = 0.5, 15.0
    M_bar[shut] = 30.0
    shut[[place, place + 1]] = False
    M_bar[[place, place + 1]] = 0.5, 15.0
    p = replace(PAPER, alpha=2.0)
    found, want = stages.score(D, M_bar, shut, p), oracle.score(D, M_bar, shut, p)
    assert np.isnan(found[shut]).all()
    assert (np.abs(found - want)[~shut] <= radius(M_bar[~shut], 2.0)).all()


@pytest.mark.spec("CC-SCORE")
@pytest.mark.parametrize("m", TRUNKS)
def test_the_greater_of_two_paths(stages: CrystalStages, m: int) -> None:
    """D wins in one half of the trunks; with alpha = 0 everywhere, to the bit."""
    D, M_bar, shut = trunks_of(m, m + 1)
    D[::2] += 0.75
    found, want = stages.score(D, M_bar, shut, PAPER), oracle.score(D, M_bar, shut, PAPER)
    by_D = ~shut & (want == D)
    assert by_D.sum() > m // 8
    assert np.isnan(found[shut]).all()
    assert (np.abs(found - want)[~shut] <= radius(M_bar[~shut], 1.0)).all()
    assert (found[by_D] == D[by_D]).all()
    alone = stages.score(D, M_bar, shut, replace(PAPER, alpha=0.0))
    assert np.array_equal(alone, np.where(shut, np.nan, D), equal_nan=True)
