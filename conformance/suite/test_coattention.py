"""Tests of S1: attention, salience and co-attention edges."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.oracles import s1
from conformance.strategies.prompts import HOT, AttentionInputs, attention_inputs, hot_sets, later_segments
from conformance.tolerances import gamma
from spec.arrays import IntMatrix
from spec.backend import CrystalStages
from spec.errors import SpecError
from spec.parameters import TINY, CrystalCacheParameters


def brute_force(inputs: AttentionInputs) -> s1.Segment:
    return s1.coattention(
        inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), inputs.parameters, inputs.scaling,
        inputs.softcap,
    )


def one_head(rows: list[list[int]], p: CrystalCacheParameters) -> AttentionInputs:
    """Return the inputs of a single head whose query i attends equally to the keys rows[i]."""
    n = len(rows)
    q = np.zeros((1, n, n), dtype=np.float32)
    for i, keys in enumerate(rows):
        q[0, i, keys] = HOT
    return AttentionInputs(q, np.eye(n, dtype=np.float32)[None], np.arange(n), p, 1.0, None)


@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION", "CC-SALIENCE", "CC-ROW-NORM", "CC-INTRA", "CC-CROSS")
@given(inputs=attention_inputs())
def test_a_prompt_lies_in_the_certified_box(stages: CrystalStages, precision: str, inputs: AttentionInputs) -> None:
    """S1 MUST compute the salience and the neighbours of Eq. 11 to 14."""
    assert not list(stage_checks.coattention(inputs.run(stages), inputs, precision))


@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION")
@given(inputs=later_segments())
def test_a_later_segment_lies_in_the_certified_box(
    stages: CrystalStages, precision: str, inputs: AttentionInputs,
) -> None:
    """C MUST count from the segment's first token, and cross edges MUST reach any live earlier key."""
    assert not list(stage_checks.coattention(inputs.run(stages), inputs, precision))


def chosen(index: IntMatrix) -> list[list[int]]:
    return [[j for j in row if j >= 0] for row in index.tolist()]


@pytest.mark.spec("CC-SALIENCE", "CC-CROSS")
@given(inputs=hot_sets())
def test_hot_sets_are_exact(stages: CrystalStages, inputs: AttentionInputs) -> None:
    """Salience, sources (ties included) and weights MUST be equal bit for bit if attention is dyadic."""
    actual, want = inputs.run(stages), brute_force(inputs)
    assert actual.salience.tolist() == want.salience
    assert chosen(actual.cross) == [[j for j, _ in row] for row in want.cross]
    weights = [[w for w in row if w] for row in actual.cross_weight.tolist()]
    assert weights == [[w for _, w in row] for row in want.cross]


@pytest.mark.spec("CC-ATTENTION", "CC-SALIENCE", "CC-CROSS")
def test_a_later_key_says_nothing(stages: CrystalStages) -> None:
    """Check that a query whose largest logit belongs to a later key has the same result as without this logit."""
    inputs = one_head([[0], [0, 1], [1, 2], [0, 3]], TINY)
    blind = inputs.run(stages)
    inputs.q[0, :3, 3] = 8 * HOT
    eager = inputs.run(stages)
    assert eager.salience.tolist() == blind.salience.tolist() == brute_force(inputs).salience
    assert chosen(eager.intra) == chosen(blind.intra)
    assert eager.cross_weight.tolist() == blind.cross_weight.tolist()


@pytest.mark.spec("CC-INTRA")
@given(inputs=hot_sets(widths=(1,), heads=(1,)))
def test_one_hot_rows_have_exact_neighbours(stages: CrystalStages, inputs: AttentionInputs) -> None:
    """The lower index MUST come first if all neighbours tie.

    Each query attends to one key, so all cosines are 0 or 1.
    """
    assert chosen(inputs.run(stages).intra) == [[j for j, _ in row] for row in brute_force(inputs).intra]


@pytest.mark.spec("CC-INTRA", "CC-COATTENTION")
@given(n=st.integers(2, 12), p=st.sampled_from([TINY, replace(TINY, k_intra=1), replace(TINY, C=3)]))
def test_uniform_attention_lies_in_the_certified_box(
    stages: CrystalStages, precision: str, n: int, p: CrystalCacheParameters,
) -> None:
    """Check queries that attend evenly to all earlier keys, so that many cosines tie in exact arithmetic."""
    inputs = AttentionInputs(np.zeros((2, n, 4)), np.ones((1, n, 4)), np.arange(n), p, 0.5, None)
    assert not list(stage_checks.coattention(inputs.run(stages), inputs, precision))


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=attention_inputs(), alone=st.booleans())
def test_one_token_lies_in_the_certified_box(
    stages: CrystalStages, precision: str, inputs: AttentionInputs, alone: bool,
) -> None:
    """The stage MUST accept n = 1, although no entry point uses it.

    The token has no neighbour in its chunk. Its neighbours in earlier chunks are selected as in longer segments.
    """
    first = -1 if alone else 0
    one = replace(inputs, q=inputs.q[:, -1:], k=inputs.k[:, first:], positions=inputs.positions[first:])
    actual = one.run(stages)
    assert (actual.intra == -1).all()
    assert not list(stage_checks.coattention(actual, one, precision))


@pytest.mark.spec("CC-EDGES")
@given(inputs=attention_inputs())
def test_edges_are_a_set_of_directed_triples(stages: CrystalStages, inputs: AttentionInputs) -> None:
    """Check that no edge is a self edge or occurs twice, that cross edges go forward, and the number of edges.

    There are at most k_intra n + k_cross max(0, n - C) edges.
    """
    p, n = inputs.parameters, len(inputs.positions)
    E = inputs.run(stages).edges()
    pairs = list(zip(E.first.tolist(), E.second.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) <= p.k_intra * n + p.k_cross * max(0, n - p.C)
    for (i, j), w in zip(pairs, E.weight.tolist(), strict=True):
        assert i != j
        assert i // p.C == j // p.C or i < j
        assert (p.tau_intra if i // p.C == j // p.C else p.tau_cross) < w <= 1 + gamma(n + 8, "float32")


@pytest.mark.spec("CC-EDGES")
@given(inputs=attention_inputs())
def test_edges_are_ordered_by_owner_and_rank(stages: CrystalStages, inputs: AttentionInputs) -> None:
    """E MUST list intra edges as (owner, neighbour), then cross edges as (source, owner), by owner and rank."""
    actual = inputs.run(stages)
    triples = zip(*(column.tolist() for column in actual.edges()), strict=True)
    assert list(triples) == stage_checks.edges_of(actual)


@pytest.mark.spec("CC-SALIENCE")
@given(inputs=attention_inputs())
def test_salience_is_clipped(stages: CrystalStages, inputs: AttentionInputs) -> None:
    """Check M_min <= S_i <= M_max."""
    S, p = inputs.run(stages).salience, inputs.parameters
    assert S.min() >= p.M_min
    assert S.max() <= p.M_max


@pytest.mark.spec("CC-SALIENCE")
@given(inputs=hot_sets(), data=st.data())
def test_salience_does_not_fall_when_a_head_is_added(
    stages: CrystalStages, inputs: AttentionInputs, data: st.DataObject,
) -> None:
    """An additional head can only raise the sum of a token's k_heads largest values."""
    extra = data.draw(st.sampled_from(range(len(inputs.q))), label="head to mirror")
    more = replace(inputs, q=np.concatenate([inputs.q, inputs.q[extra : extra + 1]]))
    assert (more.run(stages).salience >= inputs.run(stages).salience).all()


@pytest.mark.spec("CC-CROSS")
@given(inputs=attention_inputs())
def test_k_cross_0_drops_the_cross_edges_and_nothing_else(stages: CrystalStages, inputs: AttentionInputs) -> None:
    """k_cross = 0 MUST have the same result as removing E_cross."""
    a = inputs.run(stages)
    b = replace(inputs, parameters=replace(inputs.parameters, k_cross=0)).run(stages)
    assert b.cross.shape == (len(a.salience), 0)
    assert (a.salience == b.salience).all()
    assert (a.intra == b.intra).all()
    assert (a.intra_weight == b.intra_weight).all()


@pytest.mark.spec("CC-INTRA")
def test_a_threshold_is_strict_and_ties_go_to_the_lower_index(stages: CrystalStages) -> None:
    """Check that k_intra = 1 selects the lowest different index of equal cosines, and that tau_intra = 1 selects none.

    A cosine of 1 is not larger than a threshold of 1.
    """
    same = one_head([[0], [0], [0], [0]], replace(TINY, k_intra=1))
    assert same.run(stages).intra.tolist() == [[1], [0], [0], [0]]
    assert (replace(same, parameters=replace(TINY, tau_intra=1.0)).run(stages).intra == -1).all()


@pytest.mark.spec("CC-CROSS")
def test_a_cross_weight_equal_to_the_threshold_is_no_edge(stages: CrystalStages) -> None:
    """Check that Eq. 14 is strict and that the earlier of equal sources is selected. Edges are (earlier, later)."""
    rows = [[0], [1], [0, 1], [0, 1]]
    p = replace(TINY, C=2, k_cross=1, tau_cross=0.5)
    assert (one_head(rows, p).run(stages).cross == -1).all()
    for below in (0.25, float(np.nextafter(np.float32(0.5), np.float32(0)))):
        actual = one_head(rows, replace(p, tau_cross=below)).run(stages)
        assert actual.cross.tolist() == [[-1], [-1], [0], [0]]
        assert stage_checks.edges_of(actual)[-2:] == [(0, 2, 0.5), (0, 3, 0.5)]


@pytest.mark.spec("CC-ROW-NORM")
def test_rows_are_restricted_before_they_are_normalised(stages: CrystalStages) -> None:
    """Check that two rows with most of their mass in an earlier chunk are still similar inside their chunk."""
    p = replace(TINY, C=2, tau_intra=0.9)
    rows = [[0], [1], [0, 1, 2], [0, 1, 2]]
    assert one_head(rows, p).run(stages).intra[2:, 0].tolist() == [3, 2]


@pytest.mark.spec("CC-ROW-NORM")
def test_epsilon_stands_outside_the_norm(stages: CrystalStages) -> None:
    """Check that epsilon is added to the norm, not under the root.

    Rows with 5e-5 of their mass in their chunk have a cosine of 0.7. With epsilon under the root, it would be 0.2.
    """
    q, k = np.ones((1, 4, 1), dtype=np.float32), np.array([[[9.25], [9.25], [0.0], [0.0]]], dtype=np.float32)
    actual = AttentionInputs(q, k, np.arange(4), replace(TINY, C=2, tau_intra=0.6), 1.0, None).run(stages)
    assert actual.intra[2:, 0].tolist() == [3, 2]


@pytest.mark.spec("CC-ROW-NORM")
def test_a_row_without_mass_in_its_chunk_has_no_neighbour(stages: CrystalStages) -> None:
    """Check that epsilon keeps a zero row at zero, so that no number becomes NaN."""
    p = replace(TINY, C=2, tau_intra=0.0, M_min=0.0)
    actual = one_head([[0], [1], [0], [0]], p).run(stages)
    assert (actual.intra[2:] == -1).all()
    assert actual.salience.tolist() == [1, 1, 0, 0]


@pytest.mark.spec("CC-ATTENTION")
def test_query_heads_share_keys_by_consecutive_groups(stages: CrystalStages) -> None:
    """Query head h MUST read KV head h // (H / H_kv), not h modulo H_kv."""
    p = replace(TINY, k_heads=1, M_min=0.0, C=2)
    k = np.zeros((2, 2, 2), dtype=np.float32)
    k[0], k[1] = np.eye(2), np.eye(2)[::-1]
    q = np.zeros((4, 2, 2), dtype=np.float32)
    q[0, 1], q[1, 1], q[2, 1], q[3, 1] = [HOT, 0], [HOT, 0], [HOT, 0], [HOT, 0]
    groups = AttentionInputs(q, k, np.arange(2), replace(p, k_heads=4), 1.0, None)
    assert groups.run(stages).salience.tolist() == [6, 2]
    q[1, 1] = [0, HOT]
    assert groups.run(stages).salience.tolist() == [5, 3]
    q[2, 1] = [0, HOT]
    assert groups.run(stages).salience.tolist() == [6, 2]


@pytest.mark.spec("CC-ATTENTION")
def test_the_soft_cap_is_of_the_scaled_logit(stages: CrystalStages) -> None:
    """Check logits far above the cap and far below its negative: the second key gets 1 / (1 + e^2cap) = 1/4."""
    q, k = np.full((1, 2, 1), 1_000.0, dtype=np.float32), np.array([[[1.0], [-1.0]]], dtype=np.float32)
    actual = AttentionInputs(q, k, np.arange(2), TINY, 0.5, float(np.log(3.0)) / 2).run(stages)
    assert np.abs(actual.salience - [1.75, 0.25]).max() < 1e-5


@pytest.mark.spec("CC-SALIENCE")
def test_the_sum_of_heads_is_clipped_once(stages: CrystalStages) -> None:
    """Check that three heads that add 0 have M_min together, and that three heads that add 2 have M_max."""
    one = one_head([[0], [0]], replace(TINY, M_min=0.5, M_max=4.0))
    assert replace(one, q=np.repeat(one.q, 3, axis=0)).run(stages).salience.tolist() == [4.0, 0.5]


@pytest.mark.spec("CC-ATTENTION", "CC-SALIENCE")
def test_logits_beyond_ten_thousand(stages: CrystalStages) -> None:
    """Check logits of 12 000 and 11 000.4, also with a given lse: the second key gets exactly 0.

    With the opposite signs, the second key gets all weight of its query.
    """
    p, k = replace(TINY, M_min=0.0), np.array([[[1.0], [0.9167]]], dtype=np.float32)
    for size, salience in ((12_000.0, [2.0, 0.0]), (-12_000.0, [1.0, 1.0])):
        inputs = AttentionInputs(np.full((1, 2, 1), size, np.float32), k, np.arange(2), p, 1.0, None)
        largest = size * k[:, :, 0] if size < 0 else np.full((1, 2), size)
        for lse in (None, largest.astype(np.float32)):
            assert inputs.run(stages, lse).salience.tolist() == salience


@pytest.mark.spec("CC-ATTENTION", "CC-SALIENCE")
def test_each_row_and_head_has_its_own_largest_logit(stages: CrystalStages) -> None:
    """Check logits of 0, 3 000 and 6 000 in different rows and heads.

    A backend that subtracts the largest logit of all rows or heads computes exp(-3 000) = 0.
    """
    q = np.array([[[0.0], [6_000.0]], [[3_000.0], [0.0]]], np.float32)
    p = replace(TINY, M_min=0.0, k_heads=2)
    inputs = AttentionInputs(q, np.ones((1, 2, 1), np.float32), np.arange(2), p, 1.0, None)
    assert inputs.run(stages).salience.tolist() == [3.0, 1.0]


@pytest.mark.spec("CC-COATTENTION")
def test_the_largest_chunk_is_one_chunk(stages: CrystalStages) -> None:
    """Check that C = 2^31 - 1 has the result of C = n, although an offset plus C exceeds 32 bits."""
    rows = [[0], [0, 1], [1, 2], [0, 3], [2], [0, 5]]
    whole, large = (one_head(rows, replace(TINY, C=C)).run(stages) for C in (len(rows), 2**31 - 1))
    assert whole.salience.tolist() == large.salience.tolist()
    assert chosen(whole.intra) == chosen(large.intra)
    assert chosen(large.cross) == [[]] * len(rows)


@pytest.mark.spec("CC-INTRA", "CC-CROSS")
@pytest.mark.parametrize("k", [17, 33, 64, 65, 130])
def test_lists_are_as_long_as_they_may_be(stages: CrystalStages, k: int) -> None:
    """Check that the k lowest indices are selected if all cosines of a chunk and all shares of earlier keys tie.

    For k above 64, a backend may instead raise a SpecError that names k_intra or k_cross.
    """
    C = k + 3
    p = replace(TINY, C=C, k_intra=k, k_cross=k, tau_intra=0.0, tau_cross=0.0)
    try:
        actual = one_head([list(range(i + 1)) for i in range(C + 2)], p).run(stages)
    except SpecError as refused:
        if k > 64 and refused.argument in ("k_intra", "k_cross"):
            return
        raise
    alike = one_head([[0]] * C, p).run(stages)
    assert alike.intra.tolist() == [[j for j in range(C) if j != i][:k] for i in range(C)]
    assert actual.cross[C:].tolist() == [list(range(k))] * 2


@pytest.mark.spec("CC-COATTENTION", "CC-CROSS")
@pytest.mark.parametrize("live", [70, 1_100, 5_000])
def test_the_oldest_live_keys_are_sources(stages: CrystalStages, live: int) -> None:
    """Check queries that follow many live keys and give half of their attention to the fourth key."""
    q, k = np.ones((1, 8, 1), dtype=np.float32), np.zeros((1, live + 8, 1), dtype=np.float32)
    k[0, 3] = np.log(live)
    actual = AttentionInputs(q, k, np.arange(live + 8), replace(TINY, k_cross=1, tau_cross=0.25), 1.0, None).run(stages)
    assert actual.cross.tolist() == [[3]] * 8
    assert (np.abs(actual.cross_weight - 0.5) < 0.03).all()


@pytest.mark.spec("CC-SALIENCE")
@pytest.mark.parametrize(("k_heads", "S"), [(5, [10.0, 5.0]), (11, [19.0, 8.0]), (15, [23.0, 8.0])])
def test_many_heads_are_summed(stages: CrystalStages, k_heads: int, S: list[float]) -> None:
    """Check the salience of 16 heads. In 8 heads the second query attends to the first key.

    The column sums of a head are therefore 2 and 0, or 1 and 1.
    """
    q = np.zeros((16, 2, 2), dtype=np.float32)
    q[:, 0, 0], q[::2, 1, 0], q[1::2, 1, 1] = HOT, HOT, HOT
    p = replace(TINY, k_heads=k_heads, M_max=128.0, M_min=0.0)
    actual = AttentionInputs(q, np.eye(2, dtype=np.float32)[None], np.arange(2), p, 1.0, None).run(stages)
    assert actual.salience.tolist() == S


@pytest.mark.spec("CC-CROSS")
def test_shares_closer_than_float32_tie(stages: CrystalStages) -> None:
    """Check that two sources whose shares differ by 4e-10 tie, so that the lower index is selected."""
    for k in ([0.0, 1e-9, -9_000.0], [1e-9, 0.0, -9_000.0]):
        keys = np.array(k)[None, :, None]
        inputs = AttentionInputs(
            np.ones((1, 3, 1)), keys, np.arange(3), replace(TINY, C=2, k_cross=1, tau_cross=0.02), 1.0, None
        )
        assert chosen(inputs.run(stages).cross) == [[], [], [0]]
