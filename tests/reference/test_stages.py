"""Functions of S1 to S6, of decode, of the essay and of the future work on given inputs, and numbers of the papers."""

from dataclasses import asdict, replace
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks.refusals import refused, unchecked
from conformance.suite.test_decode import one_trunk
from conformance.suite.test_segments import ENDS
from reference.crystalcache import coattention, dissolution, empty_state, extend, live, prefill, tail
from reference.crystalcache.compaction import compact
from reference.crystalcache.impact import rarity
from reference.memory import kv_bytes
from spec.backend import resolve
from spec.budget import Budget
from spec.decode import TrunkWeights, check_state
from spec.errors import SpecError
from spec.parameters import ESSAY, PAPER, TINY

pytestmark = pytest.mark.usefixtures("reference_items")


@pytest.mark.spec("CC-INTRA")
def test_cosines_are_compared_as_float32_and_stored_as_they_are() -> None:
    """Cosines .5 and .5 + 1e-12 tie, and the lower index comes first."""
    rows = np.array([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.5 + 1e-12, 0.0, 0.0]])
    index, weight = coattention.intra_neighbours(rows, replace(PAPER, k_intra=2))
    assert index[0].tolist() == [1, 2]
    assert weight[0].tolist() == [0.5, 0.5 + 1e-12]


@pytest.mark.spec("CC-CROSS")
def test_selection_reads_weights_as_float32_and_stores_them_as_they_are() -> None:
    """Two weights that are equal in float32 tie. float32(0.3) is not above 0.3."""
    earlier = np.array([[0.5, 0.5 + 1e-12, float(np.float32(0.3))]])
    index, weight = coattention.cross_neighbours(earlier, replace(PAPER, tau_cross=0.3))
    assert index.tolist() == [[0, 1, -1, -1]]
    assert weight.tolist() == [[0.5, 0.5 + 1e-12, 0, 0]]


@pytest.mark.spec("CC-DISSOLVE")
def test_protected_trunks_stand_where_the_text_has_them() -> None:
    """Algorithm 1 must list positions in ascending order, before a backfill sorts them."""
    ones, protected = np.ones(2), np.array([False, True])
    actual = dissolution.dissolve(ones, np.array([0, 2, 4]), np.ones(4), ones, protected, 4, 1)
    assert actual.kept.tolist() == [0, 1, 2, 3]


@pytest.mark.spec("CC-KEEP-COUNT")
@pytest.mark.parametrize("size", [*range(2, 65), 1000, 2048])
def test_the_keep_count_is_what_the_cut_leaves(size: int) -> None:
    """Check that `round(((g - c) / g) g)` equals g - c in float64."""
    for c in range(1, size):
        assert dissolution.keep_count((size - c) / size, size, 0) == size - c


@pytest.mark.spec("CC-KEEP-COUNT")
@pytest.mark.parametrize(("r", "size", "N_min", "k"), [(0.5, 9, 3, 4), (0.5, 11, 3, 6), (0.1, 9, 3, 3), (0.9, 2, 3, 2)])
def test_the_keep_count_rounds_half_to_even(r: float, size: int, N_min: int, k: int) -> None:
    """Check Eq. 33: 4.5 is rounded to 4 and 5.5 to 6. The count is never below N_min and never above |g|."""
    assert dissolution.keep_count(r, size, N_min) == k


@pytest.mark.spec("CC-COMPACT")
@given(data=st.data(), n=st.integers(1, 9), H=st.integers(1, 3))
def test_compaction_takes_the_same_rows_of_every_head(data: st.DataObject, n: int, H: int) -> None:
    """Check Eq. 35: K[R] and V[R] in ascending order, with unchanged bits. With beta = 1, all rows are kept."""
    R = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1)), label="R")), dtype=np.int64)
    K = np.arange(H * n * 2, dtype=np.float32).reshape(H, n, 2)
    V = -np.arange(H * n * 3, dtype=np.float16).reshape(H, n, 3)
    K_R, V_R = compact(K, V, R)
    assert K_R.tolist() == [[K[h, i].tolist() for i in R] for h in range(H)]
    assert V_R.tolist() == [[V[h, i].tolist() for i in R] for h in range(H)]
    assert (K_R.dtype, V_R.dtype) == (K.dtype, V.dtype)
    assert not np.shares_memory(K_R, K)


def test_the_profile_is_the_paper_but_for_what_the_essay_says() -> None:
    """Check every value of the page's table, and that there is no further difference."""
    paper, essay = asdict(PAPER), asdict(ESSAY)
    wanted = {
        "C": 128, "k_cross": 0, "s": 2.0, "M_min": 0.0, "M_max": 128.0, "heads": "mean", "impact": "unit",
        "trunk_impact": "unit", "allocation": "tiers", "renewal": 0.3, "breath_protection": "sink+recent",
    }
    assert {name: value for name, value in essay.items() if value != paper[name]} == wanted


@pytest.mark.parametrize(
    "change",
    [{"heads": "max"}, {"impact": "essay"}, {"trunk_impact": "sum"}, {"allocation": "tier"}, {"renewal": 1.5},
     {"renewal": -0.1}, {"coverage": 1.01}, {"coverage": float("nan")}, {"rarity": "none"}, {"merge": "mean"}],
)
def test_a_form_that_is_not_there_is_refused(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with refused(name, value):
        replace(PAPER, **change)


KIB, GIB = 2**10, 2**30


@pytest.mark.spec("CC-RARITY")
@pytest.mark.parametrize(("count", "U"), [(1, 0.591), (10, 0.294), (100, 0.178)])
def test_rarity_of_a_few_counts(count: int, U: float) -> None:
    """Check Section 3.4 with its .295 corrected: 1 / (1 + ln 11) = .2943."""
    assert round(float(rarity(np.array([count]))[0]), 3) == U


@pytest.mark.spec("CC-MEMORY")
def test_a_token_of_llama_3_1_8b_takes_128_kib() -> None:
    """Check Eq. 1: L = 32, H_kv = 8, d = 128, bf16. 128K tokens take 16 GiB (the paper's "GB" is GiB)."""
    assert kv_bytes(L=32, H_kv=8, d=128, n=1, batch=1, b=2) == 128 * KIB
    assert kv_bytes(L=32, H_kv=8, d=128, n=128 * 1024, batch=1, b=2) == 16 * GIB


@pytest.mark.spec("CC-MEMORY")
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_memory_is_linear_in_the_batch(batch: int) -> None:
    """Eq. 4 is Eq. 1 times the batch size."""
    one = kv_bytes(L=3, H_kv=2, d=8, n=11, batch=1, b=4)
    assert kv_bytes(L=3, H_kv=2, d=8, n=11, batch=batch, b=4) == batch * one == batch * 2 * 3 * 2 * 8 * 11 * 4


@pytest.mark.spec("CC-TAIL")
@pytest.mark.parametrize(
    ("token", "norm", "argument"),
    [(-1, 1.0, "token_id"), (1, 0.0, "inverse_norm"), (1, -2.0, "inverse_norm"), (1, float("nan"), "inverse_norm"),
     (1.5, 1.0, "token_id"), (1, None, "inverse_norm")],
)
def test_what_is_no_token_is_refused(token: Any, norm: Any, argument: str) -> None:
    with unchecked(), refused(argument, {"token_id": token, "inverse_norm": norm}[argument]):
        tail.append(live.empty_state(Budget(count=8)), token, norm)


@pytest.mark.spec("CC-START")
@pytest.mark.parametrize("wrong", ["token_ids", "inverse_norms"])
def test_arrays_of_another_length_than_the_prompt_are_refused(wrong: str) -> None:
    rng = np.random.default_rng(0)
    q, k, ids = rng.normal(size=(2, 9, 4)), rng.normal(size=(1, 9, 4)), np.arange(9)
    given: dict[str, Any] = {"token_ids": ids, "inverse_norms": np.ones(9)}
    retention = prefill(q, k, ids, ENDS, 6, TINY)
    assert live.start_state(retention, **given, budget=Budget(count=6), parameters=TINY).seen == 9
    with unchecked(), refused(wrong, (8,)):
        live.start_state(retention, **{**given, wrong: given[wrong][:8]}, budget=Budget(count=6), parameters=TINY)


@pytest.mark.spec("CC-TAIL-TRUNKS", "CC-UNIT-IMPACT")
@pytest.mark.parametrize(("M_min", "salience"), [(0.0, 0.0), (PAPER.M_min, 1.0)])
def test_generated_tokens_of_the_unit_form_have_no_salience_or_the_largest(M_min: float, salience: float) -> None:
    """Check the sentence about `impact` in the table of parameters."""
    parameters, waiting = replace(PAPER, impact="unit", M_min=M_min), empty_state(Budget(count=8))
    for token in (5, 7):
        waiting = tail.append(waiting, token, 1.0)
    joined = tail.join_tail(waiting, ENDS, parameters, resolve("numpy"))
    assert joined.live.impact.tolist() == [0.5 * salience + 0.5 * float(rarity(np.array([1]))[0])] * 2


@pytest.mark.spec("CC-TAIL-D")
@pytest.mark.parametrize("s", [5.0, 40.0])
@pytest.mark.parametrize("mu", [0.125, 3.125, 7.0, 17.0])
def test_D_of_degree_0_in_decimals(s: float, mu: float) -> None:
    """Check x = s mu / sigma from 1.7 to 1813: D takes all magnitudes down to 0."""
    with localcontext() as digits:
        digits.prec = 60
        power = (-Decimal(s) * Decimal(mu) / Decimal("0.375")).exp()
        want = float(power / (1 + power))
    assert tolerances.close("CC-TAIL-D", [tail.edgeless_D(mu, 0.375, replace(PAPER, s=s))], [want])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("D", {"D": np.array([1.5])}), ("offsets", {"D": np.array([0.5, 0.5])}), ("counts", {"seen": 9}),
        ("positions", {"live": {"positions": np.array([0, 1, 1, 2])}}),
        ("positions", {"live": {"positions": np.array([0, 1, 2, 9])}, "tail_ids": (1,), "tail_inverse_norms": (1.0,)}),
        ("impact", {"live": {"impact": np.ones(3)}}), ("impact", {"live": {"impact": np.full(4, np.nan)}}),
        ("trunk_impact", {"live": {"trunk_impact": np.array([np.inf])}}),
        ("inverse_norms", {"live": {"inverse_norms": np.array([1.0, -1.0, 1.0, 1.0])}}),
        ("inverse_norms", {"live": {"inverse_norms": np.full(4, np.nan)}}), ("D", {"D": np.array([np.nan])}),
        ("counts", {"counts": np.array([4, 0]), "ids": np.array([3, 5])}),
        ("counts", {"counts": np.array([2, 2]), "ids": np.array([5, 5])}),
        ("tail_inverse_norms", {"tail_inverse_norms": (1.0,)}),
        ("offsets", {"live": {"offsets": np.array([0, 0, 4])}, "D": np.array([0.5, 0.5])}),
        ("W", {"W": TrunkWeights(np.array([0, 1]), np.array([0]), np.array([0.5]))}),
        ("W", {"W": TrunkWeights(np.array([0, 2]), np.array([0]), np.array([0.5]))}),
    ],
)
def test_a_state_that_cannot_be_is_refused(name: str, change: dict[str, object]) -> None:
    """A loader calls `check_state`, which names the field."""
    state = one_trunk(0.5, 1.0)
    parts = {key: replace(state.live, **value) if isinstance(value, dict) else value for key, value in change.items()}
    with pytest.raises(SpecError, match=f"^{name} = "):
        check_state(replace(state, **parts))  # type: ignore[arg-type]


@pytest.mark.spec("CC-SEGMENT", "CC-START")
def test_before_the_first_token_there_is_nothing() -> None:
    """Check that there is no token, trunk or pair. With mu = 0 and sigma = 1, a trunk without an edge has D = 0.5."""
    state = empty_state(Budget(count=3))
    live = state.live
    for array in (live.positions, live.impact, live.inverse_norms, live.trunk_impact, state.D, state.W.indices,
                  state.W.weights, state.ids, state.counts, state.stored):
        assert array.tolist() == []
    assert live.offsets.tolist() == state.W.indptr.tolist() == [0]
    assert (state.budget, state.seen, state.step, state.mu, state.sigma) == (Budget(count=3), 0, 0, 0.0, 1.0)
    assert {array.dtype for array in (live.positions, live.offsets, state.ids, state.counts)} == {np.dtype(np.int64)}


@pytest.mark.spec("CC-SEGMENT")
def test_a_segment_that_cannot_be_is_refused() -> None:
    """Check errors before anything changes: one token is a step, and keys must cover stored tokens and segment."""
    state = replace(empty_state(Budget(count=8)), seen=1, step=1, tail_ids=(3,), tail_inverse_norms=(1.0,))
    q, k = np.ones((1, 2, 2)), np.ones((1, 3, 2))
    good: dict[str, Any] = {
        "state": state, "q": q, "k": k, "token_ids": np.array([1, 2]), "sentence_ends": ENDS, "parameters": TINY,
    }
    assert extend(**good).seen == 3
    bad: list[tuple[str, dict[str, Any]]] = [
        ("q", {"q": [1.0]}), ("k", {"k": k[0]}), ("k", {"k": k[:, :2]}),
        ("token_ids", {"q": q[:, :1], "token_ids": np.array([1])}),
        ("token_ids", {"token_ids": np.array([1, -2])}), ("token_ids", {"token_ids": np.array([1, 2, 3])}),
        ("sentence_ends", {"sentence_ends": frozenset()}), ("scaling", {"scaling": 0.0}),
        ("k", {"k": np.full((1, 3, 2), np.inf)}),
    ]
    for name, changes in bad:
        with pytest.raises(SpecError, match=f"^{name} = "):
            extend(**{**good, **changes})
