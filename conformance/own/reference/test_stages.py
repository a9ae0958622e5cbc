"""The functions of S1 to S6, of the essay and of the future work, on given inputs; figures that papers print."""

import itertools
import math
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks.refusals import refused
from conformance.oracles import s2, s3, s5, s6
from conformance.strategies.numbers import end_masks, small_parameters, token_ids
from conformance.strategies.trunks import EvictionProblem, evictions, partitions, record
from conformance.suite.test_extensions import RARITIES, salient_tokens
from reference.crystalcache import coattention, coverage, dissolution, impact, protection, renewal, tiers, trunks
from reference.crystalcache.coattention import intra_neighbours, row_normalise
from reference.crystalcache.compaction import compact
from reference.crystalcache.impact import rarity, unit_impact
from reference.crystalcache.protection import effective_budget
from reference.crystalcache.score import normalised_impact
from reference.crystalcache.sentences import sentence_offsets
from reference.memory import kv_bytes
from spec.arrays import BoolVector, IntVector, Vector
from spec.backend import CrystalStages
from spec.budget import Budget, parse_budget
from spec.parameters import ESSAY, PAPER, CrystalCacheParameters
from spec.records import Trunks

pytestmark = pytest.mark.usefixtures("reference_items")


@pytest.mark.spec("CC-INTRA")
def test_cosines_are_compared_as_float32_and_stored_as_they_are() -> None:
    """Cosines .5 and .5 + 1e-12 tie, and the lower index wins."""
    rows = np.array([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.5 + 1e-12, 0.0, 0.0]])
    index, weight = coattention.intra_neighbours(rows, replace(PAPER, k_intra=2))
    assert index[0].tolist() == [1, 2]
    assert weight[0].tolist() == [0.5, 0.5 + 1e-12]


@pytest.mark.spec("CC-CROSS")
def test_selection_reads_weights_as_float32_and_stores_them_as_they_are() -> None:
    """Two weights that are one float32 tie; float32(0.3) is not above 0.3."""
    earlier = np.array([[0.5, 0.5 + 1e-12, float(np.float32(0.3))]])
    index, weight = coattention.cross_neighbours(earlier, replace(PAPER, tau_cross=0.3))
    assert index.tolist() == [[0, 1, -1, -1]]
    assert weight.tolist() == [[0.5, 0.5 + 1e-12, 0, 0]]


@pytest.mark.spec("CC-NORMALISED-IMPACT")
def test_the_logarithm_of_almost_1_is_exact_on_either_side() -> None:
    """ln(1 + 1e-12) from the rounded sum is off by 9e-17, which epsilon makes 9e-9."""
    M_bar = [0.0, 1e-12]
    found = normalised_impact(np.array(M_bar), np.zeros(2, dtype=np.bool_), PAPER.epsilon)
    want = s5.normalised_impact(M_bar, [0, 1], PAPER.epsilon)
    assert abs(found[1] - want[1]) <= tolerances.normalised_radius(M_bar, PAPER.epsilon)


@pytest.mark.spec("CC-IMPACT")
@given(S=st.floats(PAPER.M_min, PAPER.M_max), U=st.floats(0.05, 0.6))
def test_the_mixture_is_computed_in_its_stated_order(S: float, U: float) -> None:
    """Eq. 22 on given S and U is exact: S / M_max, halves, sum, product, clip; .5 S + 10 U has other bits."""
    M = PAPER.M_max * (0.5 * (S / PAPER.M_max) + 0.5 * U)
    want = min(max(M, PAPER.M_min), PAPER.M_max)
    assert impact.impact(np.array([S]), np.array([U]), PAPER).tolist() == [want]


@pytest.mark.spec("CC-INTERFACE", "CC-SENTENCES")
@given(ends=st.integers(2, 14).flatmap(end_masks), p=small_parameters())
def test_the_reference_reads_sentences_and_windows_as_the_oracle(
    ends: BoolVector, p: CrystalCacheParameters,
) -> None:
    """Item by item: sentence bounds, windows, split sizes."""
    expected = s2.sentences(ends.tolist())
    bounds = sentence_offsets(ends).tolist()
    assert [list(range(a, b)) for a, b in itertools.pairwise(bounds)] == expected
    for left, right in itertools.pairwise(expected):
        P = trunks.interface((left[0], left[-1] + 1), (right[0], right[-1] + 1))
        assert [list(side) for side in P] == [s2.last5(left), s2.first5(right)]
    for sentence in expected:
        assert trunks.split_sizes(len(sentence), p.T_max) == [len(g) for g in s2.split(sentence, p.T_max)]


@pytest.mark.spec("CC-DISSOLVE")
def test_members_come_in_the_order_of_the_text() -> None:
    """Not in that of their impact."""
    assert dissolution.strongest_members(np.array([1.0, 2.0, 9.0, 3.0]), 3).tolist() == [1, 2, 3]


@pytest.mark.spec("CC-DISSOLVE")
def test_protected_trunks_stand_where_the_text_has_them() -> None:
    """Before any backfill sorts: Algorithm 1 itself MUST list positions in ascending order."""
    ones, protected = np.ones(2), np.array([False, True])
    found = dissolution.dissolve(ones, np.array([0, 2, 4]), np.ones(4), ones, protected, 4, 1)
    assert found.kept.tolist() == [0, 1, 2, 3]


@pytest.mark.spec("CC-KEEP-COUNT")
@pytest.mark.parametrize("size", [*range(2, 65), 1000, 2048])
def test_the_keep_count_is_what_the_cut_leaves(size: int) -> None:
    """`round(((g - c) / g) g)` = g - c in float64."""
    for c in range(1, size):
        assert dissolution.keep_count((size - c) / size, size, 0) == size - c


@pytest.mark.spec("CC-KEEP-COUNT")
@pytest.mark.parametrize(("r", "size", "N_min", "k"), [(0.5, 9, 3, 4), (0.5, 11, 3, 6), (0.1, 9, 3, 3), (0.9, 2, 3, 2)])
def test_the_keep_count_rounds_half_to_even(r: float, size: int, N_min: int, k: int) -> None:
    """Eq. 33: 4.5 rounds to 4 and 5.5 to 6; never below N_min, never above |g|."""
    assert dissolution.keep_count(r, size, N_min) == k


@pytest.mark.spec("CC-CUT")
@given(problem=evictions())
def test_the_cut_needs_no_sums(problem: EvictionProblem) -> None:
    """c_0 = max(0, n - B), held to T_alive, Eq. 32's precondition."""
    sizes = problem.trunks.sizes
    T_alive = int(sizes[~problem.protected].sum())
    found = protection.cut(sizes, problem.protected, problem.budget)
    assert found == min(max(0, int(sizes.sum()) - problem.budget), T_alive)


@st.composite
def windows(draw: st.DrawFn) -> tuple[Trunks, int, int]:
    n = draw(st.integers(1, 20), label="n")
    return draw(partitions(n)), draw(st.integers(0, 24), label="N_sink"), draw(st.integers(0, 24), label="W_recent")


@pytest.mark.spec("CC-BUDGET")
@given(n=st.integers(1, 200_000), percent=st.integers(1, 100), N_sink=st.integers(0, 9), W=st.integers(0, 200))
def test_the_budget_is_an_exact_ceiling_with_a_floor(n: int, percent: int, N_sink: int, W: int) -> None:
    """Eq. 30 with beta as its exact decimal; the floor binds for counts too."""
    assert protection.effective_budget(parse_budget(percent / 100), n, N_sink, W) == max(
        N_sink + W, (percent * n + 99) // 100
    )
    assert protection.effective_budget(Budget(count=n), n, N_sink, W) == max(N_sink + W, n)


@pytest.mark.spec("CC-COMPACT")
@given(data=st.data(), n=st.integers(1, 9), H=st.integers(1, 3))
def test_compaction_takes_the_same_rows_of_every_head(data: st.DataObject, n: int, H: int) -> None:
    """Eq. 35: K[R] and V[R] in ascending order, bits unchanged; all of them at beta = 1."""
    R = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1)), label="R")), dtype=np.int64)
    K = np.arange(H * n * 2, dtype=np.float32).reshape(H, n, 2)
    V = -np.arange(H * n * 3, dtype=np.float16).reshape(H, n, 3)
    K_R, V_R = compact(K, V, R)
    assert K_R.tolist() == [[K[h, i].tolist() for i in R] for h in range(H)]
    assert V_R.tolist() == [[V[h, i].tolist() for i in R] for h in range(H)]
    assert (K_R.dtype, V_R.dtype) == (K.dtype, V.dtype)
    assert not np.shares_memory(K_R, K)


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=12)
N_MIN = st.sampled_from([3, 0, 1, 2, 4, 12])


def test_the_profile_is_the_paper_but_for_what_the_essay_says() -> None:
    """Every value of the page's table, and no other difference."""
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


@pytest.mark.spec("CC-UNIT-IMPACT")
@given(tokens=salient_tokens(), U=st.floats(0.05, 0.6))
def test_unit_impact_is_computed_in_its_stated_order(tokens: tuple[Vector, IntVector], U: float) -> None:
    """Quotient, half, half of U, sum: the same bits."""
    S = tokens[0]
    want = [0.5 * (x / max(S) if max(S) else 0.0) + 0.5 * U for x in S.tolist()]
    assert unit_impact(S, np.full(len(S), U), PAPER).tolist() == want


@pytest.mark.spec("CC-TIER-COUNT")
@given(sizes=SIZES, N_min=N_MIN, t=st.integers(-13, 13))
def test_tier_counts_equal_the_fractions(sizes: list[int], N_min: int, t: int) -> None:
    """What each rank keeps MUST be the rule in exact fractions."""
    assert tiers.tier_counts(np.array(sizes), t, N_min).tolist() == s6.tier_counts(sizes, t, N_min)


@pytest.mark.spec("CC-TIER-COUNT")
def test_a_half_is_rounded_up() -> None:
    """The essay keeps 5 of 9 at ratio 1/2; floats miss the half at rank 167 of 178."""
    assert tiers.tier_counts(np.full(10, 9), 0, 3)[6] == 5
    assert tiers.tier_counts(np.full(445, 59), 0, 3)[133 + 167] == 31


@pytest.mark.spec("CC-TIERS")
@given(sizes=SIZES, N_min=N_MIN, data=st.data())
def test_the_shift_is_the_least(sizes: list[int], N_min: int, data: st.DataObject) -> None:
    """It keeps enough, and one less does not: over all integers, since the total never falls with t."""
    B_avail = data.draw(st.integers(0, sum(sizes)), label="B_avail")
    totals = {t: sum(s6.tier_counts(sizes, t, N_min)) for t in range(-20, 21)}
    found = tiers.least_shift(np.array(sizes), B_avail, N_min)
    assert totals[found] >= B_avail
    assert all(totals[t] < B_avail for t in range(-len(sizes), found))
    assert all(totals[t] <= totals[t + 1] for t in range(-20, 20))


D_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@pytest.mark.spec("CC-RENEWAL")
@given(D=D_VALUES, share=st.floats(0, 1), data=st.data())
def test_renewal_moves_active_trunks_towards_1(D: list[float], share: float, data: st.DataObject) -> None:
    """D + renewal (1 - D) in this order where active; nothing else moves; D stays in [D, 1]."""
    active = data.draw(st.lists(st.booleans(), min_size=len(D), max_size=len(D)), label="active")
    found = renewal.renewed_D(np.array(D), np.array(active), share)
    assert found.tolist() == [d + share * (1.0 - d) if on else d for d, on in zip(D, active, strict=True)]
    assert ((found >= np.array(D)) & (found <= 1)).all()


@pytest.mark.spec("CC-RARITY-FORMS")
@pytest.mark.parametrize("form", RARITIES)
@given(ids=st.integers(1, 30).flatmap(token_ids))
def test_a_rarity_form_equals_its_formula(form: str, ids: IntVector) -> None:
    """U_i within the bound, and in (0, 1/2]."""
    c = impact.token_counts(ids)
    p = replace(PAPER, rarity=form)  # type: ignore[arg-type]
    U = RARITIES[form](c)
    assert tolerances.close("CC-RARITY-FORMS", U, [s3.rarity_of(x, p) for x in c.tolist()])
    assert ((U > 0) & (U <= 0.5)).all()


@pytest.mark.spec("CC-COVERAGE")
def test_the_reserve_is_an_exact_share_of_what_is_not_protected() -> None:
    """0.29 of 100 are 29 (28 in binary); half of 100 less 40; nothing where all fits or nothing is left."""
    free, shut = np.array([False, False]), np.array([True, False])
    assert coverage.coverage_reserve(np.array([40, 90]), free, 100, 0.29) == 29
    assert coverage.coverage_reserve(np.array([40, 90]), shut, 100, 0.5) == 30
    assert coverage.coverage_reserve(np.array([40, 60]), free, 100, 0.5) == 0
    assert coverage.coverage_reserve(np.array([140, 60]), shut, 100, 1.0) == 0


KIB, GIB = 2**10, 2**30


@pytest.mark.spec("CC-RARITY")
@pytest.mark.parametrize(("count", "U"), [(1, 0.591), (10, 0.294), (100, 0.178)])
def test_rarity_of_a_few_counts(count: int, U: float) -> None:
    """Section 3.4, with its .295 corrected: 1 / (1 + ln 11) = .2943."""
    assert round(float(rarity(np.array([count]))[0]), 3) == U


@pytest.mark.spec("CC-MEMORY")
def test_a_token_of_llama_3_1_8b_takes_128_kib() -> None:
    """Eq. 1: L = 32, H_kv = 8, d = 128, bf16; 16 GiB at 128K (the paper's "GB" is GiB)."""
    assert kv_bytes(L=32, H_kv=8, d=128, n=1, batch=1, b=2) == 128 * KIB
    assert kv_bytes(L=32, H_kv=8, d=128, n=128 * 1024, batch=1, b=2) == 16 * GIB


@pytest.mark.spec("CC-MEMORY")
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_memory_is_linear_in_the_batch(batch: int) -> None:
    """Eq. 4 is Eq. 1 times the batch."""
    one = kv_bytes(L=3, H_kv=2, d=8, n=11, batch=1, b=4)
    assert kv_bytes(L=3, H_kv=2, d=8, n=11, batch=batch, b=4) == batch * one == batch * 2 * 3 * 2 * 8 * 11 * 4


@pytest.mark.spec("CC-TRUNK-EDGES", "CC-INTRA")
def test_a_trunk_weight_can_reach_the_root_of_2(stages: CrystalStages) -> None:
    """Rows (1, 0, 0), (.5, .5, 0), (.5, .5, 0): the last two are mutual neighbours with cosine 1."""
    rows = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    index, weight = intra_neighbours(row_normalise(rows, PAPER.epsilon), PAPER)
    intra = [[(j, w) for j, w in zip(*row, strict=True) if j >= 0]
             for row in zip(index.tolist(), weight.tolist(), strict=True)]
    graph = stages.graph(
        record([1.0] * 3, intra, [[], [], []], 8, 4), Trunks(np.arange(4), np.ones(3)), PAPER
    )
    W = dict(zip(graph.indices[graph.indptr[1] : graph.indptr[2]].tolist(),
                 graph.weights[graph.indptr[1] : graph.indptr[2]].tolist(), strict=True))
    assert round(W[2], 5) == round(math.sqrt(2), 5)


@pytest.mark.spec("CC-BUDGET")
@pytest.mark.parametrize(
    ("beta", "n", "B"), [("3/10", 100, 132), ("3/10", 200, 132), ("1/2", 1001, 501), ("7/25", 25, 132)]
)
def test_budgets_have_a_floor(beta: str, n: int, B: int) -> None:
    """Eq. 30 at its floor: n = 100 and 200 at .3 both give 132."""
    share = Fraction(beta)
    assert effective_budget(Budget(fraction=share), n, PAPER.N_sink, PAPER.W_recent) == B
    assert s6.effective_budget(share, n, PAPER.N_sink, PAPER.W_recent) == B
