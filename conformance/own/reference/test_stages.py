"""The functions of S1 to S6, item by item, on given inputs: what no stage shows of them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.oracles import s1, s2, s3, s4, s5, s6
from conformance.strategies.numbers import end_masks, small_parameters, token_ids
from conformance.strategies.prompts import AttentionInputs, attention_inputs
from conformance.strategies.trunks import EvictionProblem, degrees, evictions, partitions
from conformance.suite.test_dissolution import partitions_of
from conformance.tolerances import gamma
from reference.crystalcache import coattention, dissolution, impact, protection, trunks
from reference.crystalcache.compaction import compact
from reference.crystalcache.crystallization import crystallization
from reference.crystalcache.score import normalised_impact
from reference.crystalcache.sentences import sentence_offsets
from reference.policies import full_cache, retain, streaming_llm
from spec.arrays import BoolVector, IntVector, Vector
from spec.budget import Budget, parse_budget
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import Observation
from spec.records import Trunks

pytestmark = pytest.mark.usefixtures("reference_items")


def weights_in_eighths(rows: int, columns: int) -> st.SearchStrategy[list[list[float]]]:
    row = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


@pytest.mark.spec("CC-CROSS")
@given(weights=weights_in_eighths(3, 6), k=st.integers(0, 7), tau=st.sampled_from([0.0, 0.25, 0.3]))
def test_selection_on_given_weights_is_exact(weights: list[list[float]], k: int, tau: float) -> None:
    """Higher weight first, then lower index; strictly above tau."""
    index, weight = coattention.cross_neighbours(np.array(weights), replace(PAPER, k_cross=k, tau_cross=tau))
    for row, chosen, kept in zip(weights, index.tolist(), weight.tolist(), strict=True):
        want = s1.strongest(dict(enumerate(row)), k, tau)
        assert list(zip(chosen, kept, strict=True)) == want + [(-1, 0.0)] * (k - len(want))


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


@pytest.mark.spec("CC-ATTENTION")
@given(inputs=attention_inputs())
def test_attention_is_causal_and_stochastic(inputs: AttentionInputs) -> None:
    """A query MUST see the keys at its own position and before, and its weights sum to 1."""
    at = inputs.positions
    A = coattention.attention(
        inputs.q.astype(np.float64), inputs.k.astype(np.float64), at, at, inputs.scaling, inputs.softcap
    )
    rows: Vector = np.abs(A.sum(axis=2) - 1)
    assert rows.max() <= gamma(len(at) + 8, "float64")
    assert not np.triu(A, 1).any()
    assert A.min() >= 0


@pytest.mark.spec("CC-ROW-NORM")
@given(rows=weights_in_eighths(4, 4), epsilon=st.sampled_from([1e-8, 1.0]))
def test_epsilon_stands_outside_the_norm(rows: list[list[float]], epsilon: float) -> None:
    """Eq. 12: a row's length after it is |a| / (|a| + epsilon), below 1."""
    found = coattention.row_normalise(np.array(rows), epsilon)
    norm = np.linalg.norm(np.array(rows), axis=1)
    want = norm / (norm + epsilon)
    assert (np.abs(np.linalg.norm(found, axis=1) - want) <= gamma(24, "float64")).all()
    assert (found[norm == 0] == 0).all()


@pytest.mark.spec("CC-CRYSTALLIZATION")
@given(degree=degrees(), p=small_parameters())
def test_reference_D_of_given_degrees_equals_the_oracle(degree: Vector, p: CrystalCacheParameters) -> None:
    """Eq. 27 within its radius, and Cantelli's bound: few trunks can have a large D."""
    D = crystallization(degree, p.s, p.epsilon)
    radius = tolerances.crystallization_radius(degree, p.s, p.epsilon)
    assert (np.abs(D - np.array(s4.crystallization(degree.tolist(), p))) <= radius).all()
    for d in (0.7, 0.9, 0.99):
        share = 1 / (1 + (math.log(d / (1 - d)) / p.s) ** 2)
        assert (d + radius <= D).sum() <= len(degree) * share


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_a_deviation_of_about_epsilon_may_fall_either_way() -> None:
    """Here the oracle's sigma is epsilon and the reference's below it: 0.0067 and 0.49999999 are both right."""
    degree = np.array([0.0, 1.9999999999999997e-08, 0.0, 2e-08])
    off = np.abs(crystallization(degree, PAPER.s, PAPER.epsilon) - s4.crystallization(degree.tolist(), PAPER)).max()
    assert 0.4 < off <= tolerances.crystallization_radius(degree, PAPER.s, PAPER.epsilon)
    assert tolerances.crystallization_radius(degree * 1.001, PAPER.s, PAPER.epsilon) < 1e-12


@pytest.mark.spec("CC-NORMALISED-IMPACT")
def test_the_logarithm_of_almost_1_is_exact_on_either_side() -> None:
    """ln(1 + 1e-12) from the rounded sum is off by 9e-17, which epsilon makes 9e-9."""
    M_bar = [0.0, 1e-12]
    found = normalised_impact(np.array(M_bar), np.zeros(2, dtype=np.bool_), PAPER.epsilon)
    want = s5.normalised_impact(M_bar, [0, 1], PAPER.epsilon)
    assert abs(found[1] - want[1]) <= tolerances.normalised_radius(M_bar, PAPER.epsilon)


@pytest.mark.spec("CC-COUNT", "CC-RARITY")
@given(ids=st.integers(0, 20).flatmap(token_ids))
def test_reference_counts_and_rarity_equal_the_oracle(ids: IntVector) -> None:
    """Item by item: c_i exactly, U_i within the bound of its logarithm."""
    c = impact.token_counts(ids)
    assert c.tolist() == s3.counts(ids.tolist())
    assert tolerances.close("CC-RARITY", impact.rarity(c), [s3.rarity(count) for count in c.tolist()])


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


@pytest.mark.spec("CC-SENTENCES")
def test_no_token_is_no_sentence() -> None:
    assert sentence_offsets(np.zeros(0, dtype=np.bool_)).tolist() == [0]


@pytest.mark.spec("CC-ALLOCATE")
@pytest.mark.parametrize("N_min", [0, 1, 2, 3, 4, 12])
def test_every_small_allocation(N_min: int) -> None:
    """Eq. 32 for all partitions of totals up to 11 and all cuts: the loop, the oracle and the prefix sum agree."""
    for total in range(1, 12):
        for sizes, c_0 in itertools.product(partitions_of(total), range(total + 1)):
            r = dissolution.allocate(np.array(sizes), c_0, N_min)
            want, c = s6.allocate(sizes, c_0, N_min)
            assert r.tolist() == [float(x) for x in want]
            assert [x * g for x, g in zip(want, sizes, strict=True)] == s6.closed_form(sizes, c_0, N_min)
            assert -max(0, N_min - 1) <= c <= 0


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


@pytest.mark.spec("CC-PROTECTED")
@given(case=windows())
def test_protection_takes_whole_trunks(case: tuple[Trunks, int, int]) -> None:
    """A trunk that touches the sink or the window MUST be protected, and no other; B_prot is bounded."""
    trunks, N_sink, W_recent = case
    n = int(trunks.offsets[-1])
    found = protection.protected_trunks(trunks.offsets, n, N_sink, W_recent)
    assert found.tolist() == s6.protected(stage_checks.trunk_lists(trunks), n, N_sink, W_recent)
    B_prot = int(trunks.sizes[found].sum())
    assert min(n, max(N_sink, W_recent)) <= B_prot <= N_sink + W_recent + 2 * (int(trunks.sizes.max()) - 1)


@pytest.mark.spec("CC-BUDGET")
@given(n=st.integers(1, 200_000), percent=st.integers(1, 100), N_sink=st.integers(0, 9), W=st.integers(0, 200))
def test_the_budget_is_an_exact_ceiling_with_a_floor(n: int, percent: int, N_sink: int, W: int) -> None:
    """Eq. 30 with beta as its exact decimal; the floor binds for counts too."""
    assert protection.effective_budget(parse_budget(percent / 100), n, N_sink, W) == max(
        N_sink + W, (percent * n + 99) // 100
    )
    assert protection.effective_budget(Budget(count=n), n, N_sink, W) == max(N_sink + W, n)


def blank(seen: int, groups: int = 1) -> Observation:
    return Observation(seen, groups, None, {})


@pytest.mark.spec("CC-PROTECTED")
@given(seen=st.integers(2, 60), B=st.integers(1, 70), N_sink=st.integers(0, 6))
def test_streaming_llm_keeps_the_sink_and_the_last_tokens(seen: int, B: int, N_sink: int) -> None:
    """The first N_sink tokens and the last B - N_sink, at absolute positions."""
    retention, records = retain(streaming_llm(N_sink), Budget(count=B), blank(seen))
    total = max(B, N_sink)
    last = range(max(0, seen - (total - N_sink)), seen)
    assert records is None
    assert retention.positions.tolist() == sorted({*range(min(N_sink, seen)), *last})


@pytest.mark.spec("CC-BUDGET")
@given(seen=st.integers(2, 60), B=st.integers(1, 70))
def test_full_cache_keeps_everything(seen: int, B: int) -> None:
    """Whatever the budget."""
    assert retain(full_cache(), Budget(count=B), blank(seen))[0].positions.tolist() == list(range(seen))


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
