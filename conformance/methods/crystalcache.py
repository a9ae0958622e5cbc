"""CrystalCache's prefill by the oracles of its stages. If rounding decides the kept set, `Undecided` is raised.

No code is shared with the reference.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance.methods.brute import SLOW, Brute
from conformance.oracles import pipeline
from conformance.oracles.box import State, Undecided
from conformance.oracles.scale import s1, stages
from conformance.strategies.policy_inputs import SENTENCE_ENDS, Inputs, Kept
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import LayerView

ROUNDS, UNITS = 3, 8
"""Number of perturbed inputs that must keep the same tokens, and size of the perturbation."""
FORMS = ("merge", "graph", "allocation", "trunk_impact", "coverage")
"""Parameters that change the form of a stage. The oracles of full size implement only the paper's forms."""


def prefill(view: LayerView, ids: Any, B: int, p: CrystalCacheParameters) -> list[int]:
    """Return the kept set of one layer after S1 to S6."""
    q, k, n = view.q.astype(np.float64), view.k.astype(np.float64), len(ids)
    if any(getattr(p, form) != getattr(PAPER, form) for form in FORMS):
        sinks = None if view.sinks is None else view.sinks.tolist()
        result = pipeline.prefill(
            q.tolist(), k.tolist(), ids.tolist(), SENTENCE_ENDS, B, p, view.scaling, view.softcap, sinks
        )
        return result.eviction.kept
    at = np.arange(n)
    ranked = s1.coattention(
        q, k, at, p, view.scaling, view.softcap, lambda q, k: np.zeros(q.shape[1]),
        lambda error, Q: np.zeros((Q, Q)), 0.0, view.sinks,
    )
    E = stages.edge_columns(neighbours(ranked, p))
    M = stages.token_impact(ranked.salience, stages.counts(ids), p)
    bounds = stages.trunks(np.isin(ids, sorted(SENTENCE_ENDS)), E, 0, p)
    D = stages.crystallization(degrees(E, bounds, p), p)
    shut = stages.protected(bounds, n, p)
    scores = stages.score(D, stages.trunk_impact(M, bounds), shut, p)
    return [int(i) for i in stages.dissolve(scores, bounds, M, D, shut, B, p.N_min).kept]


def neighbours(result: s1.Scored, p: CrystalCacheParameters) -> Any:
    """Return the neighbour lists of each token: the places whose weights, as float32, are above the threshold."""
    record: dict[str, Any] = {"start": result.start}
    for name, ranked, k, tau in (("intra", result.intra, p.k_intra, p.tau_intra),
                                 ("cross", result.cross, p.k_cross, p.tau_cross)):
        weight = ranked.weight[:, :k]
        record[name] = np.where(weight.astype(np.float32) > np.float32(tau), ranked.index[:, :k], -1)
        record[f"{name}_weight"] = weight
    return SimpleNamespace(**record)


def degrees(E: stages.Columns, bounds: Any, p: CrystalCacheParameters) -> Any:
    """Return the degree of each trunk: the sum of its unpruned edges, by ascending neighbour."""
    result = stages.pairs(E, bounds[:-1])
    w = stages.pair_weights(result, np.diff(bounds))
    there = w > p.tau_edge
    a, b, w = result.a[there], result.b[there], w[there]
    rows, others, both = np.concatenate([a, b]), np.concatenate([b, a]), np.concatenate([w, w])
    order = np.lexsort((others, rows))
    return stages.in_groups(rows[order], both[order], len(bounds) - 1)


def kept(inputs: Inputs, B: int, parameters: CrystalCacheParameters) -> Kept:
    """Return the kept set of the observed layer, if all inputs within some units of rounding have the same kept set.

    Raises:
        Undecided: if the kept sets differ.
    """
    view = inputs.layers[parameters.observed_layer]
    result = prefill(view, inputs.token_ids, B, parameters)
    if State.unit:
        rng = np.random.default_rng(0)
        for _ in range(ROUNDS):
            q, k = (x * (1 + UNITS * State.unit * rng.uniform(-1, 1, x.shape))
                    for x in (view.q.astype(np.float64), view.k.astype(np.float64)))
            if prefill(replace(view, q=q, k=k), inputs.token_ids, B, parameters) != result:
                raise Undecided("a trunk")
    return [result]


BRUTE = Brute("CC-PREFILL", "crystalcache", kept, {"parameters": PAPER}, published={"parameters": PAPER}, scored=False,
              longest=SLOW)
"""Brute force of CrystalCache. It is not in BRUTES, because its vectors and promises are on pages of CrystalCache."""
