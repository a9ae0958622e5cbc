"""EpiCache: the score of a cached key is the largest attention weight from the queries of a patched prompt."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from reference.crystalcache.coattention import attention
from reference.policies.attention import ROWS, group_maximum, wide, wide_sinks
from reference.policies.budgets import Competition, LayersThenHeads
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from reference.policies.tables import Table
from spec.arrays import Float64, Matrix
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["epicache", "epicache_score"]


def epicache_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """Return each cached key's largest attention weight over the query heads and the queries of the patched prompt.

    Implements: PO-EPICACHE

    Source: EpiCache's official code. The softmax is over the cached keys only, and every query attends to all cached
    keys.
    """
    q, k = wide(view.q), wide(view.k)
    n, sinks = k.shape[1], wide_sinks(view.sinks)
    largest: Matrix = np.zeros(k.shape[:2])
    for first in range(0, q.shape[1], ROWS):
        rows = q[:, first : first + ROWS]
        A = attention(rows, k, np.full(rows.shape[1], n), np.arange(n), view.scaling, view.softcap, sinks)
        np.maximum(largest, group_maximum(A, len(k)).max(axis=1), out=largest)
    return largest


def epicache(shares: Sequence[int] = ()) -> Policy:
    """Return EpiCache's eviction: each layer keeps the tokens with the best scores among all KV heads of the layer.

    The observation's queries q must be the queries of the patched prompt. The patched prompt itself is not cached.
    `models_integration.prefill_episodes` reads a dialogue and calls this policy after each block. `shares` has the
    tokens of each layer, such as the result of `layer_shares`. By default, shares are equal.

    EpiCache chooses episodes by embeddings. The CrystalCache paper writes that EpiCache chooses episodes by attention.
    """
    heads = Competition(Fraction(0))
    budgets = LayersThenHeads(Table(0, "_".join(map(str, shares))), heads) if len(shares) else heads
    return Policy(
        "epicache", LayerScorer(Needs("all", None), epicache_score), budgets, top_units, SinkAndRecent(0, 0),
        granularity=Granularity.HEAD,
    )
