"""KVzip: rehearsals, scores, shares over all layers and static head budgets, against brute force."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import kvzip as brute
from conformance.methods import kvzip as oracle
from conformance.methods.brute import REHEARSED, rehearsed
from conformance.methods.policies import Score
from conformance.plugin import sparingly
from conformance.strategies.numbers import Numbers
from conformance.strategies.policy_inputs import TEMPLATE, Inputs, calibrated, drawn, identity, observation
from conformance.tolerances import scores_agree
from reference import policies
from reference.calibration import load_calibration, save_calibration
from reference.policies.budgets import across_layers
from reference.policies.kvzip import kvzip_plus_score, kvzip_score, rehearsal_chunks
from reference.policies.kvzip_heads import FullHeads, head_scores
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import LayerView, Rehearsal, Scores

pytestmark = pytest.mark.usefixtures("reference_items")


seeds = st.integers(0, 2**32 - 1)


def shown(inputs: Inputs, **constants: Any) -> list[tuple[LayerView, Any]]:
    """The layers as a rehearsal with these constants shows them, values included, and their W_o."""
    seen = observation(policies.kvzip(**{**REHEARSED, **constants}), inputs).layers
    return [(view, inputs.W_o[at]) for at, view in seen.items()]


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
@sparingly
@given(seed=seeds, N_sink=st.integers(0, 3), chunk=st.integers(1, 9))
def test_scores_lie_within_their_bound(seed: int, N_sink: int, chunk: int) -> None:
    for view, W_o in shown(drawn(seed), N_sink=N_sink, chunk=chunk):
        plain, free = rehearsed(view), slice(N_sink, max(N_sink, view.k.shape[1] - REHEARSED["N_recent"]))
        for found, want in (
            (kvzip_score(view, N_sink), oracle.scores(plain, N_sink)),
            (kvzip_plus_score(view, N_sink, W_o), oracle.scores(plain, N_sink, W_o.tolist())),
        ):
            assert all(scores_agree(a[free], b[free]) for a, b in zip(found, want, strict=True))
            assert np.isnan(np.delete(found, np.arange(view.k.shape[1])[free], axis=1)).all()


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
def test_repeats_of_hundreds_of_tokens() -> None:
    """More queries than are taken at a time, of which a late one decides."""
    ((view, W_o),) = shown(drawn(3, n=560, L=1, heads=(1, 1)), chunk=600)
    (repeat,) = view.repeats or ()
    louder = replace(repeat, q=repeat.q * np.linspace(0.1, 3.0, repeat.q.shape[1])[:, None])
    view = replace(view, repeats=(louder,))
    plain, free = rehearsed(view), slice(REHEARSED["N_sink"], 560 - REHEARSED["N_recent"])
    assert scores_agree(kvzip_score(view, 4)[0, free], oracle.scores(plain, 4)[0][free])
    assert scores_agree(kvzip_plus_score(view, 4, W_o)[0, free], oracle.scores(plain, 4, W_o.tolist())[0][free])


@pytest.mark.spec("PO-REHEARSAL")
@given(
    n=st.integers(1, 40), N_sink=st.integers(0, 5), N_recent=st.integers(0, 5), chunk=st.integers(1, 12),
    overlap=st.integers(0, 12),
)
def test_what_is_read_is_what_brute_force_reads(n: int, N_sink: int, N_recent: int, chunk: int, overlap: int) -> None:
    ids = 100 + np.arange(n)
    found = rehearsal_chunks(ids, Rehearsal(TEMPLATE, N_sink, N_recent, chunk, overlap))
    spans, read = oracle.chunks(ids.tolist(), TEMPLATE, N_sink, N_recent, chunk, overlap)
    assert [[start, stop] for start, stop, _ in found] == spans
    assert [each.tolist() for _, _, each in found] == read


@pytest.mark.spec("PO-REHEARSAL")
def test_chunks_of_thousands_of_tokens() -> None:
    """As many tokens as the official chunks have, and many chunks."""
    ids = np.arange(9_001)
    for chunk in (40, 2000):
        found = rehearsal_chunks(ids, Rehearsal(TEMPLATE, 5, 3, chunk, 8))
        spans, read = oracle.chunks(ids.tolist(), TEMPLATE, 5, 3, chunk, 8)
        assert ([[a, b] for a, b, _ in found], [each.tolist() for _, _, each in found]) == (spans, read)


def shares(values: Any, total: int) -> list[int]:
    rows = np.asarray(values, dtype=np.float64)
    return [int(share) for share in across_layers(total, Scores(rows, np.arange(rows.shape[1] + 1), heads=1))]


@pytest.mark.spec("PO-GLOBAL-BUDGET")
@given(seed=seeds, groups=st.integers(1, 5), n=st.integers(2, 9), pinned=st.integers(0, 2), B=st.integers(2, 12))
def test_shares_over_all_layers_are_those_of_brute_force(seed: int, groups: int, n: int, pinned: int, B: int) -> None:
    """Many scores tie."""
    rows = np.random.default_rng(seed).integers(0, 5, (groups, n)).astype(np.float64)
    rows[:, :pinned] = np.nan
    found = shares(rows, B * groups)
    assert found == oracle.global_shares([[None if np.isnan(x) else float(x) for x in row] for row in rows], B)
    assert sum(found) == groups * min(B, n)


@pytest.mark.spec("PO-GLOBAL-BUDGET")
def test_shares_of_many_tokens() -> None:
    rows: list[Score] = [[*row] for row in Numbers(5).fractions(70 * 700).reshape(70, 700).tolist()]
    assert shares(rows, 70 * 300) == oracle.global_shares(rows, 300)


@pytest.mark.spec("PO-KVZIP-PLUS")
def test_what_cannot_be_weighed_is_refused() -> None:
    ((view, W_o), *_) = shown(drawn(3, n=20))
    with pytest.raises(SpecError, match="needs the values"):
        kvzip_plus_score(replace(view, v=None), 4, W_o)
    assert view.repeats is not None
    none = replace(view.repeats[0], norms=0 * view.repeats[0].norms)
    with pytest.raises(SpecError, match="norms above 0"):
        kvzip_plus_score(replace(view, repeats=(none,)), 4, W_o)


@pytest.mark.spec("PO-KVZIP")
def test_a_prompt_that_was_not_rehearsed_is_refused() -> None:
    inputs = drawn(3, n=20)
    policy = policies.kvzip(**REHEARSED)
    seen = observation(policy, inputs)
    bare = replace(seen, layers={at: replace(view, repeats=None) for at, view in seen.layers.items()})
    with pytest.raises(SpecError, match="repeats the prompt"):
        policies.retain(policy, Budget(count=12), bare)


def head_shares(scores: list[float], n: int, B: int, window: int) -> list[int]:
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


@pytest.mark.spec("PO-FULL-HEADS")
@given(seed=seeds, heads=st.integers(1, 8), n=st.integers(1, 30), window=st.integers(0, 12), extra=st.integers(0, 25))
def test_shares_are_those_of_brute_force(seed: int, heads: int, n: int, window: int, extra: int) -> None:
    """Few scores, so that heads tie; the sum is exact."""
    scores = np.random.default_rng(seed).integers(0, 3, heads).astype(float).tolist()
    found = head_shares(scores, n, window + extra, window)
    assert found == brute.full_heads(scores, n, window + extra, window)
    assert sum(found) == heads * min(window + extra, n)


@pytest.mark.spec("PO-FULL-HEADS")
@pytest.mark.parametrize(("heads", "n", "B"), [(1_000, 400, 300), (300, 5_000, 700), (70_000, 12, 9)])
def test_shares_of_many_heads(heads: int, n: int, B: int) -> None:
    scores = Numbers(heads).integers(0, heads // 2, heads).astype(np.float64)
    found, full = np.array(head_shares(scores.tolist(), n, B, 8)), (B - 8) * heads // (n - 8)
    assert found.sum() == heads * B
    assert sorted(np.flatnonzero(found == n)) == sorted(np.lexsort((np.arange(heads), -scores))[:full])
    assert np.ptp(found[found < n]) <= 1


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
    with pytest.raises(SpecError, match="was made for a different model"):
        policies.kvzip_heads(taken, replace(identity(inputs), model="other"))
    with pytest.raises(SpecError, match="sink = -1"):
        policies.kvzip_heads(taken, identity(inputs), -1)
