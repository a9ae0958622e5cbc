"""EpiCache's inner scoring: cached keys by what a patched prompt attends to."""

from fractions import Fraction

import numpy as np

from reference.crystalcache.coattention import attention
from reference.policies.attention import group_maximum, wide, wide_sinks
from reference.policies.budgets import Competition
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["epicache", "epicache_score"]


def epicache_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """The largest weight that any query of the patched prompt, in any head of the group, gives a cached key.

    Implements: PO-EPICACHE

    Source: EpiCache's official code. The softmax is over the cached keys alone, and every query sees all of them.
    """
    q, k = wide(view.q), wide(view.k)
    n = k.shape[1]
    A = attention(q, k, np.full(q.shape[1], n), np.arange(n), view.scaling, view.softcap, wide_sinks(view.sinks))
    largest: Matrix = group_maximum(A, len(k)).max(axis=1)
    return largest


def epicache() -> Policy:
    """The layer's best tokens, whichever KV head they are in. q must be the patched prompt's, which is not cached.

    Episodes, their embedding and the choice of one by the question are not part of this: they need the dialogue.
    CrystalCache's text has episodes ranked by attention; they are chosen by embeddings.
    """
    return Policy(
        "epicache", LayerScorer(Needs("all", None), epicache_score), Competition(Fraction(0)), top_units,
        SinkAndRecent(0, 0), granularity=Granularity.HEAD,
    )
