"""Static head budgets: head scores, exact shares and kept sets against brute force; what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.oracles import kvzip as brute
from conformance.assurance.policy_cases import CASES
from conformance.strategies.numbers import Numbers
from conformance.strategies.policy_inputs import calibrated, decided, drawn, identity
from reference import policies
from reference.calibration import load_calibration, save_calibration
from reference.policies.kvzip_heads import FullHeads, head_scores
from spec.arrays import Matrix
from spec.errors import SpecError
from spec.policy import Scores

pytestmark = pytest.mark.usefixtures("reference_items")

seeds = st.integers(0, 2**32 - 1)


def shares(scores: list[float], n: int, B: int, window: int) -> list[int]:
    empty = Scores(np.zeros((len(scores), n)), np.arange(n + 1))
    found = FullHeads(np.array(scores), window)(B * len(scores), empty)
    assert found.dtype == np.int64
    return found.tolist()


@pytest.mark.spec("PO-HEAD-SCORES")
@given(seed=seeds, contexts=st.integers(1, 4), heads=st.integers(1, 6))
def test_head_scores_are_those_of_brute_force(seed: int, contexts: int, heads: int) -> None:
    """Of exact numbers; the first tokens of each context were not rehearsed."""
    rng = np.random.default_rng(seed)
    given_rows = [rng.integers(0, 64, (heads, int(n))) / 64 for n in rng.integers(2, 9, contexts)]
    for rows in given_rows:
        rows[:, : int(rng.integers(0, 2))] = np.nan
    plain = [[[None if np.isnan(x) else x for x in row] for row in rows.tolist()] for rows in given_rows]
    assert head_scores(given_rows).tolist() == brute.head_means(plain)


@pytest.mark.spec("PO-HEAD-SCORES")
def test_the_best_token_of_a_long_context_counts_wherever_it_stands() -> None:
    rows = Numbers(3).integers(0, 10**6, 2 * 9_000).reshape(2, 9_000) / 10**6
    rows[0, 8_500] = rows[1, 0] = 2.0
    assert head_scores([rows]).tolist() == [2.0, 2.0]


@pytest.mark.spec("PO-HEAD-SCORES")
@pytest.mark.parametrize("contexts", [[], [np.full((2, 3), np.nan)], [np.zeros((2, 0))]])
def test_a_context_without_a_rehearsed_token_is_refused(contexts: list[Matrix]) -> None:
    with pytest.raises(SpecError) as caught:
        head_scores(contexts)
    assert caught.value.argument == "contexts"


@pytest.mark.spec("PO-FULL-HEADS")
@given(seed=seeds, heads=st.integers(1, 8), n=st.integers(1, 30), window=st.integers(0, 12), extra=st.integers(0, 25))
def test_shares_are_those_of_brute_force(seed: int, heads: int, n: int, window: int, extra: int) -> None:
    """Few scores, so that heads tie; the sum is exact."""
    scores = np.random.default_rng(seed).integers(0, 3, heads).astype(float).tolist()
    found = shares(scores, n, window + extra, window)
    assert found == brute.full_heads(scores, n, window + extra, window)
    assert sum(found) == heads * min(window + extra, n)


@pytest.mark.spec("PO-FULL-HEADS")
@pytest.mark.parametrize(("heads", "n", "B"), [(1_000, 400, 300), (300, 5_000, 700), (70_000, 12, 9)])
def test_shares_of_many_heads(heads: int, n: int, B: int) -> None:
    scores = Numbers(heads).integers(0, heads // 2, heads).astype(np.float64)
    found, full = np.array(shares(scores.tolist(), n, B, 8)), (B - 8) * heads // (n - 8)
    assert found.sum() == heads * B
    assert sorted(np.flatnonzero(found == n)) == sorted(np.lexsort((np.arange(heads), -scores))[:full])
    assert np.ptp(found[found < n]) <= 1


@pytest.mark.spec("PO-FULL-HEADS")
def test_another_number_of_heads_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        FullHeads(np.ones(3), 2)(8, Scores(np.zeros((2, 5)), np.arange(6)))
    assert caught.value.argument == "calibration"


@pytest.mark.spec("PO-KVZIP-HEADS")
@given(seed=seeds, B=st.integers(1, 30))
def test_kept_sets_are_those_of_brute_force(seed: int, B: int) -> None:
    case, inputs = CASES["kvzip-heads"], drawn(seed)
    assert decided(case.policy(inputs), inputs, B) == case.expected(inputs, max(B, case.floor))


@pytest.mark.spec("PO-KVZIP-HEADS", "TA-CALIBRATION")
def test_the_file_brings_head_scores_back_and_none_where_there_were_none(tmp_path: Path) -> None:
    taken = calibrated(inputs := drawn(2))
    for one in (taken, replace(taken, head_scores=None)):
        save_calibration(one, tmp_path / "mine.npz")
        read = load_calibration(tmp_path / "mine.npz")
        assert read.digest == one.digest
        assert (read.head_scores is None) is (one.head_scores is None)
    assert taken.digest != one.digest
    with pytest.raises(SpecError, match="has no head scores"):
        policies.kvzip_heads(one, identity(inputs))


@pytest.mark.spec("PO-KVZIP-HEADS", "TA-CALIBRATION")
def test_head_scores_of_another_shape_or_model_are_refused() -> None:
    taken = calibrated(inputs := drawn(2))
    assert taken.head_scores is not None
    with pytest.raises(SpecError, match=r"calibration\.head_scores"):
        replace(taken, head_scores=np.ones((len(taken.layers) + 1, 2)))
    with pytest.raises(SpecError, match=r"calibration\.head_scores"):
        replace(taken, head_scores=np.full_like(taken.head_scores, np.nan))
    with pytest.raises(SpecError, match="is another model's"):
        policies.kvzip_heads(taken, replace(identity(inputs), model="other"))
    with pytest.raises(SpecError, match="sink = -1"):
        policies.kvzip_heads(taken, identity(inputs), -1)
