"""Tests of later segments, which follow a cache that is not empty."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import decode_checks, stage_checks
from conformance.oracles import decode, s4
from conformance.oracles.decode import Trunk
from conformance.strategies.numbers import token_ids
from conformance.strategies.prompts import AttentionInputs, prompts
from conformance.strategies.trunks import decode_parameters, degrees, ends, record, states, texts
from conformance.vectors.codec import csr_of, pairs_of
from reference.crystalcache import empty_state, extend, prefill, start_state
from spec.arrays import IntVector, Vector
from spec.backend import Backend, BreathStages
from spec.budget import Budget, parse_budget
from spec.decode import DecodeState, TrunkWeights, check_state
from spec.parameters import PAPER, TINY, CrystalCacheParameters
from spec.records import Trunks

ENDS = ends()


@dataclass(frozen=True)
class Turn:
    """A state, and the inputs of the segment after it."""

    state: DecodeState
    q: Any
    k: Any
    ids: IntVector
    parameters: CrystalCacheParameters

    @property
    def positions(self) -> IntVector:
        n = len(self.ids)
        return np.concatenate([self.state.stored, np.arange(self.state.seen, self.state.seen + n)])

    def run(self, backend: Backend, **changes: Any) -> DecodeState:
        given: dict[str, Any] = {
            "state": self.state, "q": self.q, "k": self.k, "token_ids": self.ids, "sentence_ends": ENDS,
            "parameters": self.parameters, "backend": backend, **changes,
        }
        return extend(**given)


@st.composite
def turns(draw: st.DrawFn, parameters: st.SearchStrategy[CrystalCacheParameters] | None = None) -> Turn:
    """Draw a segment of one or several chunks after a state with gaps, with or without a tail, or after no tokens."""
    p = draw(decode_parameters() if parameters is None else parameters, label="parameters")
    state = draw(states(p, max_m=4), label="state")
    n = draw(st.integers(2, 9), label="n")
    stored = len(state.stored)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    scale = draw(st.sampled_from([1.0, 3.0]), label="peakedness")
    k = rng.standard_normal((2, stored + n, 4)).astype(np.float32)
    q = (scale * rng.standard_normal((4, n, 4))).astype(np.float32)
    # These queries attend to a stored token, which makes edges across the border of the segment.
    for row in draw(st.lists(st.integers(0, n - 1), max_size=4), label="readers"):
        q[:, row] = 3 * np.repeat(k[:, draw(st.integers(0, stored + n - 1), label="read")], 2, axis=0)
    return Turn(state, q, k, draw(token_ids(n), label="ids"), p)


@pytest.mark.spec("CC-SEGMENT")
@given(turn=turns())
def test_a_segment_is_its_stages_in_order(
    decoders: list[Backend], precision: str, turn: Turn,
) -> None:
    """Check S1 over the stored tokens, then the table, then the eviction, each from the result before it."""
    p, positions, decoder = turn.parameters, turn.positions, decoders[len(turn.ids) % len(decoders)]
    crystal, breath = decoder.require_crystal(), decoder.require_breath()
    actual = crystal.coattention(turn.q, turn.k, positions, p, 0.5, None)
    inputs = AttentionInputs(turn.q, turn.k, positions, p, 0.5, None)
    assert not list(stage_checks.coattention(actual, inputs, precision))
    norms = breath.inverse_key_norms(turn.k[:, len(turn.state.stored) :])
    after = turn.run(decoder)
    assert not list(decode_checks.segment(turn.state, after, actual, turn.ids, norms, ENDS, p, decoder))
    check_state(after)


@pytest.mark.spec("CC-SEGMENT")
@given(turn=turns())
def test_a_segment_leaves_older_values_alone(decoder: Backend, turn: Turn) -> None:
    """Check that a segment has no decay and no step, and does not change values of older tokens and trunks.

    Check that M_i and Mbar of kept tokens and trunks, W between older trunks, mu and sigma do not change.
    """
    before, after = turn.state, turn.run(decoder)
    assert (after.step, after.seen) == (before.step, before.seen + len(turn.ids))
    assert before.seen == 0 or (after.mu, after.sigma) == (before.mu, before.sigma)
    assert after.tail_ids == ()
    M = dict(zip(before.live.positions.tolist(), before.live.impact.tolist(), strict=True))
    still = [at for at, i in enumerate(after.live.positions.tolist()) if i in M]
    assert [after.live.impact[at] for at in still] == [M[int(after.live.positions[at])] for at in still]
    old, new = decode_checks.model(before), decode_checks.model(after)
    owner = {i: g for g in old.trunks for i in g.members}
    pairs = [(g, owner[g.members[0]]) for g in new.trunks if g.members[0] in owner]
    for g, was in pairs:
        assert g.M_bar == was.M_bar
        assert g.D <= was.D
        for h, was_too in pairs:
            if g is not h:
                now = new.W.get(frozenset({g.name, h.name}))
                assert now == old.W.get(frozenset({was.name, was_too.name}))


@pytest.mark.spec("CC-SEGMENT")
@given(turn=turns())
def test_a_segment_protects_sink_and_window(decoder: Backend, turn: Turn) -> None:
    """Check that the last W_recent tokens and the live sink tokens are kept, for any `breath_protection`."""
    p = turn.parameters
    after = turn.run(decoder)
    recent = set(range(max(0, after.seen - p.W_recent), after.seen)) & set(turn.positions.tolist())
    sink = set(range(p.N_sink)) & set(turn.positions.tolist())
    assert recent | sink <= set(after.stored.tolist())
    again = turn.run(decoder, parameters=replace(p, breath_protection="none"))
    once_more = turn.run(decoder, parameters=replace(p, breath_protection="sink+recent"))
    assert decode_checks.same_bits(again, once_more)


@pytest.mark.spec("CC-SEGMENT")
@given(turn=turns())
def test_a_segment_changes_nothing_in_place(decoder: Backend, turn: Turn) -> None:
    """Check that read-only arrays are accepted, and that equal arguments have equal results, bit for bit."""
    for array in (turn.q, turn.k, turn.ids):
        array.flags.writeable = False
    assert decode_checks.same_bits(turn.run(decoder), turn.run(decoder))


@pytest.mark.spec("CC-SEGMENT")
def test_a_tail_token_can_be_read_and_linked(decoder: Backend) -> None:
    """Check that a turn whose queries attend only to two tail tokens has an edge to the trunk of these tokens."""
    state = replace(
        empty_state(Budget(count=100)), seen=2, step=2, tail_ids=(3, 3), tail_inverse_norms=(1.0, 1.0)
    )
    k = 64 * np.eye(4, dtype=np.float32)[None]
    q = np.zeros((1, 2, 4), dtype=np.float32)
    q[:, :, 1] = 64
    after = extend(state, q, k, np.array([4, 5]), ENDS, replace(TINY, C=2), decoder)
    assert after.live.offsets.tolist() == [0, 2, 4]
    assert after.W.indices.tolist() == [1, 0]
    assert after.W.weights.round(12).tolist() == [round(0.5**0.5, 12)] * 2


@pytest.mark.spec("CC-SEGMENT", "CC-START")
@given(prompt=prompts(), form=st.sampled_from(["exact", "count"]))
def test_on_nothing_a_segment_is_the_prefill(decoder: Backend, prompt: Any, form: str) -> None:
    """Check that `extend` of an empty state equals `start_state` of the result of `prefill`, bit for bit."""
    given = prompt.arguments
    given["budget"] = prompt.budget if form == "exact" else 7
    actual = prefill(**given, backend=decoder)
    budget, p = parse_budget(given["budget"]), given["parameters"]
    norms = decoder.require_breath().inverse_key_norms(given["k"])
    start = start_state(actual, given["token_ids"], norms, budget, p)
    again = extend(
        empty_state(budget), given["q"], given["k"], given["token_ids"], given["sentence_ends"], p, decoder,
        scaling=given["scaling"], softcap=given["softcap"], sinks=given["sinks"],
    )
    assert decode_checks.same_bits(start, again)
    check_state(start)
    assert start.stored.tolist() == actual.kept.tolist()


@pytest.mark.spec("CC-SEGMENT")
@given(prompt=prompts())
def test_the_default_scaling_of_a_segment_is_one_over_the_root_of_d(decoder: Backend, prompt: Any) -> None:
    given, empty = prompt.arguments, empty_state(Budget(count=7))
    parts = (given["q"], given["k"], given["token_ids"], given["sentence_ends"], given["parameters"], decoder)
    assert decode_checks.same_bits(extend(empty, *parts), extend(empty, *parts, scaling=given["q"].shape[2] ** -0.5))


@pytest.mark.spec("CC-START")
@given(prompt=prompts())
def test_the_state_after_a_prompt_knows_all_its_tokens(decoder: Backend, prompt: Any) -> None:
    """Check the counts of all ids, D, M and norms of kept tokens, and mu and sigma of all trunks.

    Trunks of which no token is kept count for mu and sigma.
    """
    given = prompt.arguments
    actual = prefill(**given, backend=decoder)
    norms = decoder.require_breath().inverse_key_norms(given["k"])
    state = start_state(actual, given["token_ids"], norms, parse_budget(given["budget"]), given["parameters"])
    ids = given["token_ids"].tolist()
    assert dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True)) == {i: ids.count(i) for i in ids}
    assert {state.ids.dtype, state.counts.dtype} == {np.dtype(np.int64)}
    assert state.live.impact.tolist() == actual.impact[actual.kept].tolist()
    assert state.live.inverse_norms.tolist() == norms[actual.kept].tolist()
    alive = actual.ratio > 0
    assert state.D.tolist() == actual.D[alive].tolist()
    assert state.live.trunk_impact.tolist() == actual.trunks.impact[alive].tolist()
    degree = actual.graph.degree.tolist()
    mean = sum(degree) / len(degree)
    spread = (sum((x - mean) ** 2 for x in degree) / len(degree)) ** 0.5
    p = given["parameters"]
    radius = tolerances.settled_radius(actual.graph.degree, p.s, p.epsilon)
    assert abs(state.mu - mean) <= radius
    assert abs(state.sigma - (1.0 if spread < p.epsilon else spread)) <= radius
    assert (state.seen, state.step, state.tail_ids) == (len(ids), 0, ())


@st.composite
def reaching(draw: st.DrawFn) -> tuple[Any, IntVector, IntVector, TrunkWeights, CrystalCacheParameters]:
    """Draw the table of a state, and edges of a segment to any live token of the state."""
    p = draw(decode_parameters(), label="parameters")
    state = draw(states(p, tail=False), label="state")
    text = draw(texts(8), label="text")
    n, start = len(text.ends), state.seen
    result = text.coattention
    near = np.where(result.intra >= 0, result.intra + start, -1)
    cross = []
    for at in range(n):
        before = [*state.live.positions.tolist(), *range(start, start + at)]
        chosen = draw(st.lists(st.sampled_from(before), unique=True, max_size=3), label="sources") if before else []
        cross.append([(j, draw(st.integers(1, 16), label="sixteenths") / 16) for j in chosen])
    late = record([1.0] * n, [[] for _ in range(n)], cross, 0, 3, start)
    edges = replace(result, start=start, intra=near, cross=late.cross, cross_weight=late.cross_weight)
    inner = draw(st.sets(st.integers(1, n - 1)), label="boundaries")
    offsets = start + np.array([0, *sorted(inner), n], dtype=np.int64)
    bounds = np.concatenate([state.live.positions[state.live.offsets[:-1]], offsets])
    return edges, bounds, np.concatenate([state.live.sizes, np.diff(offsets)]), state.W, p


@pytest.mark.spec("CC-SEGMENT-GRAPH")
@given(case=reaching())
def test_the_graph_of_a_segment_reaches_older_trunks(breath_stages: BreathStages, case: Any) -> None:
    """Check that weights of old pairs are exact, and that weights of new pairs are pruned and satisfy Eq. 25.

    Eq. 25 uses live sizes. The matrix is symmetric with ascending columns.
    """
    actual, bounds, sizes, W, p = case
    got = breath_stages.segment_graph(actual, bounds, sizes, W, p)
    old, m = len(W.indptr) - 1, len(sizes)
    names = list(range(m))
    before = {name: array.tolist() for name, array in W._asdict().items()}
    want = pairs_of(before, list(range(old)))
    spans = stage_checks.trunk_lists(Trunks(bounds, np.ones(m)))
    E = stage_checks.edges_of(actual)
    for b in range(old, m):
        for a in range(b):
            w = s4.trunk_weight(s4.cross_weights(E, spans[a], spans[b]), int(sizes[a]), int(sizes[b]), p.tau_edge)
            if w:
                want[frozenset({a, b})] = w
    right = csr_of(want, names)
    assert got.indptr.tolist() == right["indptr"]
    assert got.indices.tolist() == right["indices"]
    assert tolerances.close("CC-TRUNK-WEIGHT", got.weights, right["weights"])
    by_pair = pairs_of({name: array.tolist() for name, array in got._asdict().items()}, names)
    assert all(by_pair[pair] == w for pair, w in pairs_of(before, list(range(old))).items())


@pytest.mark.spec("CC-SEGMENT-GRAPH")
@given(text=texts())
def test_without_older_trunks_it_is_the_graph_stage(decoder: Backend, text: Any) -> None:
    """Check that `segment_graph` without older trunks equals the graph stage, bit for bit."""
    stages, breath_stages = decoder.require_crystal(), decoder.require_breath()
    trunks = stages.trunks(text.coattention, text.impact, text.ends, text.parameters)
    right = stages.graph(text.coattention, trunks, text.parameters)
    nothing = TrunkWeights(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))
    got = breath_stages.segment_graph(text.coattention, trunks.offsets, trunks.sizes, nothing, text.parameters)
    for name in ("indptr", "indices", "weights"):
        assert getattr(got, name).tolist() == getattr(right, name).tolist()


@pytest.mark.spec("CC-SEGMENT-GRAPH", "CC-TRUNK-WEIGHT")
@pytest.mark.parametrize("bits", [31, 32, 53, 62])
def test_sizes_whose_product_passes_a_width(breath_stages: BreathStages, bits: int) -> None:
    """Check the weight of one edge between an old trunk of many live tokens and a new trunk of 2^13 tokens."""
    new, old = 2**13, 2 ** (bits - 13) + 3
    actual = record([1.0] * new, [[]] * new, [[(5, 0.75)], *[[]] * (new - 1)], 0, 1, old)
    alone = TrunkWeights(np.zeros(2, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))
    got = breath_stages.segment_graph(
        actual, np.array([0, old, old + new]), np.array([old, new]), alone, replace(PAPER, tau_edge=0.0)
    )
    assert got.indices.tolist() == [1, 0]
    assert tolerances.close("CC-TRUNK-WEIGHT", got.weights, [0.75 * (old * new) ** -0.5] * 2)


@pytest.mark.spec("CC-SEGMENT-D")
@given(degree=degrees(), data=st.data(), p=decode_parameters())
def test_new_trunks_stand_on_the_scale_of_all(
    breath_stages: BreathStages, degree: Vector, data: st.DataObject, p: CrystalCacheParameters,
) -> None:
    """Check D of the new trunks, which is Eq. 27 over old and new degrees."""
    old = data.draw(st.integers(0, len(degree) - 1), label="old")
    actual = breath_stages.segment_crystallization(degree, old, p)
    trunks = [Trunk(g, [g], 1.0, 0.0) for g in range(len(degree))]
    decode.settle(degree.tolist(), trunks, trunks[old:], p)
    want = np.array([g.D for g in trunks[old:]])
    radius = 0.0 if p.graph == "zero" else tolerances.crystallization_radius(degree, p.s, p.epsilon)
    assert actual.shape == want.shape
    assert (np.abs(actual - want) <= radius).all()


@pytest.mark.spec("CC-SEGMENT-D")
def test_the_scale_of_the_new_alone_is_rejected(breath_stages: BreathStages) -> None:
    """Check that a new trunk of degree 2 after trunks of degree 0 and 1 has D = 0.998.

    On the scale of the new trunk alone, D would be 0.5.
    """
    actual = breath_stages.segment_crystallization(np.array([0.0, 1.0, 2.0]), 2, PAPER)
    assert actual.round(3).tolist() == [0.998]
