"""Knorm keeps keys with small norms."""

import numpy as np

from reference.policies.attention import wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["knorm", "knorm_score"]


def knorm_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """Return minus the Euclidean norm of each cached key.

    Implements: PO-KNORM

    Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, Section 4.
    """
    k = wide(view.k)
    norm: Matrix = np.sqrt((k * k).sum(axis=2))
    return -norm


@named("knorm", "Devoto et al., L2 norm (arXiv 2406.11430)", "tokens with the smallest key norms")
def knorm() -> Policy:
    """Return Knorm: each KV head keeps the B keys with the smallest norms.

    The official code does not evict from prompts of at most 2048 tokens. The official experiments do not evict from
    layers 0 and 1. kvpress rounds the budget down. cold-compress protects ten recent tokens.
    """
    return Policy(
        "knorm", LayerScorer(Needs("all", query_rows=0), knorm_score), even, top_units, SinkAndRecent(0, 0),
        granularity=Granularity.HEAD,
    )
