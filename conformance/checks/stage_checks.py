"""Checks of the output of each stage: complaints, or none if the output is right.

The tests of single stages and the end-to-end tests share these checks. Each check receives the input of the tested
stage, so a near tie in an earlier stage causes no complaint. A kept set passes end to end only if every stage passes. A
kept set that passes follows from S1 outputs inside the certified box.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from conformance import tolerances
from conformance.checks.failing_input import unequal
from conformance.oracles import s1, s2, s3, s4, s5, s6
from conformance.strategies.prompts import AttentionInputs, Prompt
from conformance.strategies.trunks import EvictionProblem
from conformance.tolerances import Interval
from spec.arrays import BoolVector, IntMatrix, IntVector, Matrix, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, CrystalRetention, Dissolution, TrunkGraph, Trunks


def trunk_lists(trunks: Trunks) -> list[s2.Trunk]:
    """Return the trunks as lists of positions."""
    offsets = trunks.offsets.tolist()
    return [list(range(start, stop)) for start, stop in itertools.pairwise(offsets)]


def edges_of(result: CoAttention) -> list[s1.Edge]:
    """Return the triples of Eq. 15, read from the padded arrays one by one."""
    def rows(index: IntMatrix, weight: Matrix) -> list[list[tuple[int, float]]]:
        pairs = (zip(row, weights, strict=True) for row, weights in zip(index.tolist(), weight.tolist(), strict=True))
        return [[(j, w) for j, w in row if j >= 0] for row in pairs]

    return s1.edges(s1.Segment(
        result.start, [], rows(result.intra, result.intra_weight), rows(result.cross, result.cross_weight)
    ))


def dense(result: TrunkGraph) -> Matrix:
    """Return W as a matrix."""
    m = len(result.degree)
    W: Matrix = np.zeros((m, m))
    for g in range(m):
        row = slice(int(result.indptr[g]), int(result.indptr[g + 1]))
        W[g, result.indices[row]] = result.weights[row]
    return W


def coattention(result: CoAttention, inputs: AttentionInputs, precision: str) -> Iterator[str]:
    """Compare S1 with the oracle, inside the certified box."""
    p, q, k = inputs.parameters, inputs.q.tolist(), inputs.k.tolist()
    positions = inputs.positions.tolist()
    n = len(q[0])
    before = len(positions) - n
    error = tolerances.attention_error(
        inputs.q, inputs.k, inputs.scaling, inputs.softcap, precision, inputs.sinks
    ).tolist()
    if result.start != positions[before]:
        yield f"S1: start is {result.start}, not {positions[before]}"
    for name in ("salience", "intra", "intra_weight", "cross", "cross_weight"):
        want, kind = np.int64 if name in ("intra", "cross") else np.float64, getattr(result, name).dtype
        if kind != want:
            yield f"S1: {name} is of {kind}"
    for name in ("intra", "cross"):
        index, weight = getattr(result, name), getattr(result, f"{name}_weight")
        if (index < -1).any() or weight[index < 0].any():
            yield f"S1: an empty place of {name} is not -1 with weight 0"
    for c in range(0, n, p.C):
        stop = min(c + p.C, n)
        first, last = before + c, before + stop
        A = s1.attention(
            [head[c:stop] for head in q], [head[:last] for head in k], positions[first:last], positions[:last],
            inputs.scaling, inputs.softcap, inputs.sinks,
        )
        yield from _chunk(result, A, range(c, stop), positions, before, error, p, precision)


def _chunk(
    result: CoAttention, A: list[list[list[float]]], tokens: range, positions: list[int], before: int,
    error: list[float], p: CrystalCacheParameters, precision: str,
) -> Iterator[str]:
    c, stop, first = tokens.start, tokens.stop, before + tokens.start
    inside = [[row[first:] for row in head] for head in A]
    radius = tolerances.salience_radius(inside, error[c:stop], p.k_heads, p.M_min, precision, p.heads)
    for i, (S, r) in zip(tokens, zip(s1.salience(inside, p), radius, strict=True), strict=True):
        if result.salience[i] not in Interval.around(S, r):
            yield f"S1: salience of token {i} is {result.salience[i]}, not {S} within {r}"
    mean = s1.head_mean(A)
    rows = s1.row_normalise([row[first:] for row in mean], p.epsilon)
    for i in tokens:
        cosines = {
            positions[first + j]: _around(
                s1.cosine(rows, i - c, j),
                tolerances.cosine_error(error[i], error[c + j], stop - c, len(A), precision),
            )
            for j in range(stop - c) if j != i - c
        }
        yield from _neighbours(
            f"S1: neighbours of token {i} inside its chunk", result.intra[i], result.intra_weight[i], cosines,
            p.tau_intra,
        )
        share = error[i] + tolerances.gamma(len(A) + 2, precision) + tolerances.gamma(len(A) + 2, "float64")
        sources = {positions[j]: _around(mean[i - c][j], share) for j in range(first)}
        yield from _neighbours(
            f"S1: sources of token {i} in earlier chunks", result.cross[i], result.cross_weight[i], sources,
            p.tau_cross,
        )


def _around(weight: float, relative: float) -> Interval:
    return Interval.around(weight, weight * relative + tolerances.SMALLEST["float32"])


def _neighbours(
    what: str, index: IntVector, weight: Vector, boxes: dict[int, Interval], tau: float,
) -> Iterator[str]:
    chosen = [j for j in index.tolist() if j >= 0]
    if index.tolist() != chosen + [-1] * (len(index) - len(chosen)) or weight[len(chosen) :].any():
        yield f"{what}: {index.tolist()} {weight.tolist()} is not padded at the end with -1 and 0"
    elif not tolerances.list_is_realisable(chosen, boxes, len(index), tau):
        yield f"{what}: {chosen} out of {boxes}"
    elif any(w not in boxes[j] for j, w in zip(chosen, weight.tolist(), strict=False)):
        yield f"{what}: weights {weight.tolist()} of {chosen} out of {boxes}"
    else:
        keys = [(-s1.float32(w), j) for j, w in zip(chosen, weight.tolist(), strict=False)]
        if keys != sorted(keys) or any(-key <= s1.float32(tau) for key, _ in keys):
            yield f"{what}: {chosen} with {weight.tolist()} is not in order above {tau}"


def impact(result: Vector, salience: Vector, ids: IntVector, p: CrystalCacheParameters) -> Iterator[str]:
    """Check S3 from given salience."""
    want = s3.impact(salience.tolist(), ids.tolist(), p)
    exact = p.impact in ("salience", "uniform") or p.rarity == "reciprocal"
    if result.tolist() != want if exact else not tolerances.close("CC-IMPACT", result, want):
        yield unequal("S3: M", result, want)


def trunks(
    result: Trunks, given: CoAttention, M: Vector, ends: BoolVector, p: CrystalCacheParameters,
) -> Iterator[str]:
    """Check S2 from given edges and M: the trunks must be exact."""
    want = s2.trunks(ends.tolist(), edges_of(given), p, given.start)
    if trunk_lists(result) != want:
        yield f"S2: offsets are {result.offsets.tolist()}, not {[g[0] for g in want]}"
        return
    M_bar = s3.unit_trunk_impact([s3.trunk_impact(M.tolist(), [i - given.start for i in g]) for g in want], p)
    if not tolerances.close("CC-TRUNK-IMPACT", result.impact, M_bar):
        yield unequal("S2: trunk impact", result.impact, M_bar)


def graph(result: TrunkGraph, given: CoAttention, among: Trunks, p: CrystalCacheParameters) -> Iterator[str]:
    """Check S4 from given edges and trunks. D is checked from the degrees that the stage reports."""
    lists, E = trunk_lists(among), edges_of(given)
    if (np.diff(result.indptr) < 0).any() or any(
        (np.diff(result.indices[result.indptr[g] : result.indptr[g + 1]]) <= 0).any() for g in range(len(lists))
    ):
        yield f"S4: rows {result.indptr.tolist()} {result.indices.tolist()} do not ascend"
        return
    W = dense(result)
    for a, g_a in enumerate(lists):
        for b, g_b in enumerate(lists):
            free = 0.0 if a == b else s4.unpruned_weight(s4.cross_weights(E, g_a, g_b), len(g_a), len(g_b))
            near_tie = tolerances.close("CC-TRUNK-WEIGHT", [free], [p.tau_edge])
            want = free if free > p.tau_edge else 0.0
            if not tolerances.close("CC-TRUNK-WEIGHT", [W[a, b]], [want]) and not (
                near_tie and (W[a, b] == 0 or tolerances.close("CC-TRUNK-WEIGHT", [W[a, b]], [free]))
            ):
                yield f"S4: W({a}, {b}) is {W[a, b]}, not {want}"
    if (W != W.T).any():
        yield f"S4: W is not symmetric: {W.tolist()}"
    deg = s4.degree(W.tolist())
    if not tolerances.close("CC-DEGREE", result.degree, deg):
        yield unequal("S4: degree", result.degree, deg)
    D = np.array(s4.crystallization(result.degree.tolist(), p))
    radius = 0.0 if p.graph == "zero" else tolerances.crystallization_radius(result.degree, p.s, p.epsilon)
    if (np.abs(result.D - D) > radius).any():
        yield unequal("S4: D", result.D, D)


def score(
    result: Vector, D: Vector, M_bar: Vector, protected: BoolVector, p: CrystalCacheParameters,
) -> Iterator[str]:
    """Check S5 from given D and trunk impact."""
    if not np.isnan(result[protected]).all():
        yield f"S5: {result.tolist()} scores a protected trunk"
    alive = np.flatnonzero(~protected).tolist()
    want = s5.score(D.tolist(), M_bar.tolist(), alive, p)
    if not alive:
        return
    radius = p.alpha * tolerances.normalised_radius([M_bar[g] for g in alive], p.epsilon)
    for g in alive:
        by_D = want[g] == D[g] and result[g] == D[g]
        if not by_D and not abs(result[g] - want[g]) <= radius:
            yield f"S5: score of trunk {g} is {result[g]}, not {want[g]} within {radius}"


def dissolution(
    result: Dissolution, given: Vector, among: Trunks, M: Vector, D: Vector, protected: BoolVector, B: int,
    p: CrystalCacheParameters,
) -> Iterator[str]:
    """Check S6 from given scores: the kept set must be exact."""
    first = int(among.offsets[0])
    lists = [[i - first for i in g] for g in trunk_lists(among)]
    scores = {g: x for g, x in enumerate(given.tolist()) if not protected[g]}
    want = s6.evict(lists, scores, M.tolist(), D.tolist(), protected.tolist(), B, p)
    if result.kept.tolist() != [first + i for i in want.kept]:
        yield f"S6: kept {result.kept.tolist()}, not {want.kept}"
    if result.ratio.tolist() != [float(r) for r in want.ratio]:
        yield f"S6: r is {result.ratio.tolist()}, not {[float(r) for r in want.ratio]}"
    if not tolerances.close("CC-DISSOLVE-D", result.D, want.D):
        yield unequal("S6: D", result.D, want.D)


def eviction(result: Dissolution, given: EvictionProblem) -> Iterator[str]:
    """Check S6 of a drawn problem."""
    g = given
    yield from dissolution(result, g.score, g.trunks, g.impact, g.D, g.protected, g.budget, g.parameters)


def retention(result: CrystalRetention, prompt: Prompt, precision: str) -> Iterator[str]:
    """Check all stages of one prefill."""
    p, ids = prompt.inputs.parameters, prompt.token_ids
    n = len(ids)
    ends = np.isin(ids, sorted(prompt.sentence_ends))
    yield from coattention(result.coattention, prompt.inputs, precision)
    yield from impact(result.impact, result.coattention.salience, ids, p)
    yield from trunks(result.trunks, result.coattention, result.impact, ends, p)
    yield from graph(result.graph, result.coattention, result.trunks, p)
    protected = s6.protected(trunk_lists(result.trunks), n, p.N_sink, p.W_recent)
    if result.protected.tolist() != protected:
        yield f"S6: protected {result.protected.tolist()}, not {protected}"
    B = s6.effective_budget(prompt.share, n, p.N_sink, p.W_recent)
    if result.budget != B:
        yield f"S6: B is {result.budget}, not {B}"
    yield from score(result.scores, result.graph.D, result.trunks.impact, result.protected, p)
    given = Dissolution(result.kept, result.ratio, result.D)
    yield from dissolution(
        given, result.scores, result.trunks, result.impact, result.graph.D, result.protected, B, p
    )
