"""Full sizes: oracles compared with brute force on small inputs, and the number of cases."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks.stage_checks import edges_of, trunk_lists
from conformance.methods import policies as brute_policies
from conformance.methods.brute import plain
from conformance.methods.expected_attention import expected_attention as brute_expected_attention
from conformance.oracles import decode as brute_decode
from conformance.oracles import diversity as brute_diversity
from conformance.oracles import nestedkv as brute_nestedkv
from conformance.oracles import s1, s2, s3, s4, s5, s6
from conformance.oracles.decode import Model, Trunk
from conformance.oracles.scale import decode, selectors, stages
from conformance.oracles.scale import s1 as scale_s1
from conformance.strategies.numbers import Numbers, seeds
from conformance.strategies.policy_inputs import drawn, with_sinks
from conformance.strategies.prompts import AttentionInputs, attention_inputs, later_segments
from conformance.strategies.scale_attention import RANKS, Shape
from conformance.strategies.trunks import (
    EvictionProblem,
    Text,
    decode_parameters,
    degrees,
    evictions,
    flags,
    graphs,
    inverse_norms,
    partitions,
    texts,
)
from conformance.suite import test_scale_prefill as prefill
from conformance.suite import test_scale_s1 as s1_cases
from conformance.vectors.codec import pairs_of
from spec.arrays import Vector
from spec.parameters import NESTEDKV, PAPER, NestedKVParameters
from spec.records import Trunks

SMALL_UNITS = 64  # This bounds the rounding of sums of about a dozen terms on both sides.


def same(a: Any, b: Any) -> bool:
    """Return whether values are equal up to rounding in a different order."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    u = tolerances.UNIT_ROUNDOFF["float64"]
    return a.shape == b.shape and bool((np.abs(a - b) <= SMALL_UNITS * 16 * u * np.maximum(np.abs(a), np.abs(b))).all())


@given(inputs=st.one_of(attention_inputs(), later_segments()))
def test_attention(inputs: AttentionInputs) -> None:
    """Check CC-COATTENTION: salience, and every list with its weights if no near tie decides."""
    p = inputs.parameters
    actual = scale_s1.coattention(
        inputs.q, inputs.k, inputs.positions, p, inputs.scaling, inputs.softcap,
        lambda q, k: np.full(q.shape[1], 1e-12), lambda error, Q: np.full((Q, Q), 1e-12), 0.0, inputs.sinks,
    )
    want = s1.coattention(
        inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), p, inputs.scaling, inputs.softcap,
        inputs.sinks,
    )
    assert actual.start == want.start
    assert same(actual.salience, want.salience)
    assert same(actual.moves, actual.unclipped * 1e-12)
    for got, rows, k, tau in (
        (actual.intra, want.intra, p.k_intra, p.tau_intra), (actual.cross, want.cross, p.k_cross, p.tau_cross),
    ):
        for index, weight, row in zip(got.index.tolist(), got.weight.tolist(), rows, strict=True):
            mine = [(j, w) for j, w in zip(index[:k], weight[:k], strict=True) if s1.float32(w) > s1.float32(tau)]
            assert same([w for _, w in mine], [w for _, w in row])
            values = [s1.float32(w) for w in weight]
            apart = all(a - b > 1e-6 * a for a, b in itertools.pairwise(values[: k + 1]) if b)
            assert not apart or [j for j, _ in mine] == [j for j, _ in row]


@given(inputs=attention_inputs())
def test_denominators(inputs: AttentionInputs) -> None:
    positions = inputs.positions
    want = s1.log_sum_exp(
        inputs.q.tolist(), inputs.k.tolist(), positions.tolist(), positions.tolist(), inputs.scaling, inputs.softcap
    )
    actual = scale_s1.log_sum_exp(inputs.q, inputs.k, positions, inputs.scaling, inputs.softcap)
    assert np.abs(actual - np.array(want)).max() < 1e-10


@given(text=texts(), ids=st.lists(st.sampled_from([1, 2, 65_537, 2**40]), min_size=16, max_size=16))
def test_trunks_and_impact(text: Text, ids: list[int]) -> None:
    """Check CC-EDGES, CC-TRUNKS, CC-TRUNK-IMPACT, CC-COUNT, CC-IMPACT."""
    p, given_ = text.parameters, text.coattention
    E = stages.edge_columns(given_)
    assert list(zip(*(column.tolist() for column in E), strict=True)) == edges_of(given_)
    want = s2.trunks(text.ends.tolist(), edges_of(given_), p)
    offsets = stages.trunks(text.ends, E, 0, p)
    assert trunk_lists(Trunks(offsets, np.ones(len(offsets) - 1))) == want
    M_bar = [s3.trunk_impact(text.impact.tolist(), g) for g in want]
    assert stages.trunk_impact(text.impact, offsets).tolist() == M_bar
    assert stages.sentences(text.ends).tolist() == [0, *[g[-1] + 1 for g in s2.sentences(text.ends.tolist())]]
    c = stages.counts(np.array(ids))
    assert c.tolist() == s3.counts(ids)
    S = np.linspace(0.1, 19, len(ids))
    assert tolerances.close("CC-IMPACT", stages.token_impact(S, c, p), s3.impact(S.tolist(), ids, p))


@given(text=texts(), data=st.data())
def test_graph(text: Text, data: st.DataObject) -> None:
    """Check CC-TRUNK-EDGES, CC-TRUNK-WEIGHT and CC-DEGREE for any partition."""
    among = data.draw(partitions(len(text.ends)), label="trunks")
    lists, E = trunk_lists(among), edges_of(text.coattention)
    actual = stages.pairs(stages.edge_columns(text.coattention), among.offsets[:-1])
    weights = stages.pair_weights(actual, among.sizes)
    got = {(a, b): w for a, b, w in zip(actual.a.tolist(), actual.b.tolist(), weights.tolist(), strict=True)}
    want = {
        (a, b): s4.unpruned_weight(s4.cross_weights(E, lists[a], lists[b]), len(lists[a]), len(lists[b]))
        for a, b in itertools.combinations(range(len(lists)), 2) if s4.cross_weights(E, lists[a], lists[b])
    }
    assert got == want


@given(degree=degrees(), data=st.data())
def test_scores(degree: Vector, data: st.DataObject) -> None:
    """Check CC-CRYSTALLIZATION and CC-SCORE."""
    D = stages.crystallization(degree, PAPER)
    assert (np.abs(D - s4.crystallization(degree.tolist(), PAPER)) < 1e-12).all()
    shut = np.array(data.draw(st.lists(st.booleans(), min_size=len(D), max_size=len(D)), label="protected"))
    want = s5.score(D.tolist(), (degree + 1).tolist(), np.flatnonzero(~shut).tolist(), PAPER)
    actual = stages.score(D, degree + 1, shut, PAPER)
    assert np.isnan(actual[shut]).all()
    assert same(actual[~shut], [want[g] for g in np.flatnonzero(~shut).tolist()])


@given(problem=evictions())
def test_dissolution(problem: EvictionProblem) -> None:
    """Check CC-CUT, CC-ALLOCATE, CC-KEEP-COUNT and CC-DISSOLVE with the closed form."""
    p, want = problem, problem.expected()
    actual = stages.dissolve(p.score, p.trunks.offsets, p.impact, p.D, p.protected, p.budget, p.parameters.N_min)
    assert actual.kept.tolist() == want.kept
    assert actual.ratio.tolist() == [float(r) for r in want.ratio]
    assert actual.D.tolist() == want.D
    n = len(p.impact)
    assert stages.protected(p.trunks.offsets, n, PAPER).tolist() == s6.protected(
        problem.lists, n, PAPER.N_sink, PAPER.W_recent
    )


@given(data=st.data(), p=decode_parameters())
def test_decode(data: st.DataObject, p: Any) -> None:
    """Check CC-ACTIVATION, CC-RESONANCE and CC-HEBB."""
    m = data.draw(st.integers(1, 7), label="m")
    W = data.draw(graphs(m), label="W")
    active = data.draw(flags(m), label="active")
    D = np.linspace(0.1, 0.9, m)
    names = pairs_of({name: x.tolist() for name, x in W._asdict().items()}, list(range(m)))
    model = Model(0, trunks=[Trunk(g, [g], 1.0, x) for g, x in enumerate(D.tolist())], W=names)
    brute_decode.resonance(model, set(np.flatnonzero(active).tolist()), p)
    assert decode.resonance(D, W, active, p).tolist() == [g.D for g in model.trunks]
    stays = np.flatnonzero(active)
    alive, _, rows_left = selectors.left(np.arange(m + 1), W, active)
    assert alive == stays.tolist()
    brute_decode.keep(model, set(alive), D.tolist())
    assert rows_left == [
        [(b, names[frozenset({g, h})]) for b, h in enumerate(alive) if frozenset({g, h}) in names] for g in alive
    ]
    assert [g.name for g in model.trunks] == alive
    after = brute_decode.hebb(names, set(np.flatnonzero(active).tolist()), p)
    if p.hebb == "additive":
        rows = [x.tolist() for x in decode.hebbian(W, active, p)]
        actual = dict(zip(("indptr", "indices", "weights"), rows, strict=True))
        assert pairs_of(actual, list(range(m))) == after
    norms = data.draw(inverse_norms(m), label="norms")
    model = Model(0, trunks=[Trunk(g, [g], 1.0, 0.0) for g in range(m)], norm=dict(enumerate(norms.tolist())))
    actual_active = decode.activation(norms, np.arange(m + 1), p.theta_act)
    assert set(np.flatnonzero(actual_active).tolist()) == brute_decode.active(model, p)


@given(seed=seeds, n=st.integers(1, 20), lam=st.sampled_from([0.0, 0.5, 3.0]))
def test_diversity(seed: int, n: int, lam: float) -> None:
    """Check DV-COSINE and DV-GREEDY."""
    numbers = Numbers(seed)
    V = (numbers.fractions(3 * 5).reshape(3, 5) - 0.5)[numbers.integers(0, 3, n)]
    s, retained = numbers.integers(0, 3, n) / 4, numbers.integers(0, 4, n) == 0
    k = int(retained.sum()) + (n - int(retained.sum())) // 2
    want = brute_diversity.alpha(s.tolist(), V.tolist(), np.flatnonzero(retained).tolist(), k, lam)
    assert selectors.diverse(s, V, retained, k, lam).tolist() == want
    assert selectors.cosines_with(V, 0).tolist() == [brute_diversity.cosine(v, V[0].tolist()) for v in V.tolist()]


@given(seed=seeds, n=st.integers(2, 40))
def test_nestedkv(seed: int, n: int) -> None:
    """Check NK-SCORE."""
    keys = Numbers(seed).fractions(n * 4).reshape(n, 4) - 0.3
    for p in (NESTEDKV, NestedKVParameters(b_min=3, b_max=5, blocks=7, W=4)):
        assert np.abs(selectors.nestedkv(keys, p).score - brute_nestedkv.scores(keys.tolist(), p)).max() < 1e-6


@given(seed=seeds)
def test_policies(seed: int) -> None:
    """Check PO-OBSERVED-ATTENTION, PO-EXPECTED-ATTENTION without sinks, and PO-TOP-UNITS of single tokens."""
    inputs = with_sinks(drawn(seed), seed)
    view = inputs.layers[0]
    actual = selectors.attended(view.q, view.k, view.scaling, view.softcap, view.sinks)
    want = np.array(brute_policies.last_rows(plain(view), inputs.n))
    assert actual.shape == want.shape
    assert np.abs(actual - want).max() < 1e-12
    numbers, n = Numbers(seed), inputs.n
    turns = inputs.inv_freq, inputs.factor
    scores, _ = selectors.expected(
        view.q, view.k, view.v, np.arange(n), np.arange(n, n + 5), *turns, view.scaling, view.sinks
    )
    brute = brute_expected_attention(plain(view), inputs.n, inputs.inv_freq.tolist(), inputs.factor, 0, 5)
    assert np.abs(scores - np.array(brute)).max() < 1e-12
    s, shut = numbers.integers(0, 4, n) / 4, numbers.integers(0, 5, n) == 0
    row = [None if safe else x for x, safe in zip(s.tolist(), shut.tolist(), strict=True)]
    for B in range(n + 1):
        assert selectors.whole_units(s, np.ones(n, dtype=np.int64), shut, B) == brute_policies.top(row, B)


@given(k=st.integers(1, 4), n=st.integers(1, 5))
def test_key_norms(k: int, n: int) -> None:
    """Check CC-KEY-NORM."""
    keys = Numbers(k * n).fractions(k * n * 3).reshape(k, n, 3)
    want = [brute_decode.inverse_norm(list(token)) for token in keys.transpose(1, 0, 2).tolist()]
    assert same(decode.inverse_norms(keys), want)


def test_the_numbers_are_splitmix64() -> None:
    """Compare with the first three numbers of seed 1234567, as published for different implementations."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert Numbers(1234567).words(3).tolist() == first
    numbers = Numbers(1234567)
    assert [int(numbers.words(1)[0]) for _ in range(3)] == first


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_permutation_holds_every_number(seed: int) -> None:
    assert sorted(Numbers(seed).permutation(1_000).tolist()) == list(range(1_000))


SHAPES: list[Shape] = [*s1_cases.ADDRESSED, *s1_cases.LADDERED, *(shape for _, shape, _ in prefill.FULL)]


def test_full_size_cases_are_few() -> None:
    """Check that CI has at most six full cases, with H n up to 131 072.

    All remaining cases of S1 have n up to 3 000.
    """
    assert len(prefill.FULL) <= 6
    assert max(shape.H * shape.n for shape in SHAPES) <= 131_072
    assert max(shape.n for shape in [*s1_cases.ADDRESSED, *s1_cases.LADDERED]) <= 3_000
    assert RANKS < 16
