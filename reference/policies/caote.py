"""CAOTE: the score of a token is the change of the attention output if the token is evicted."""

import numpy as np

from reference.policies.attention import group_mean, observed_attention, wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.arrays import Cube, Float64, Matrix
from spec.errors import SpecError
from spec.policy import Cadence, LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["caote", "caote_error", "caote_score"]


def caote_error(alpha: Float64[Matrix, "H_kv n"], v: Float64[Cube, "H_kv n d"]) -> Float64[Matrix, "H_kv n"]:
    """Return alpha_j / (1 - alpha_j) ||X - v_j||: the change of the attention output X if only token j is evicted.

    alpha_j is the attention weight on token j. If alpha_j is 1, the returned change is inf.

    Implements: PO-CAOTE

    Source: Theorem 3.2 of CAOTE, and Eq. 7 of CrystalCache. The weights alpha and the weight of an attention sink
    together sum to 1. An attention sink has the value vector 0.
    """
    X = (alpha[:, :, None] * v).sum(axis=1, keepdims=True)
    distance = np.sqrt(((X - v) ** 2).sum(axis=2))
    rest = 1.0 - alpha
    error: Matrix = np.divide(alpha * distance, rest, out=np.full_like(alpha, np.inf), where=rest > 0)
    return error


def caote_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """Return the `caote_error` of each key. alpha is the attention of the last query, averaged over the query heads.

    Implements: PO-CAOTE

    Raises:
        SpecError: if the values were not captured.
    """
    if view.v is None:
        raise SpecError("v", None, "is needed, because CAOTE uses the values")
    return caote_error(group_mean(observed_attention(view, 1)[:, 0], len(view.k)), wide(view.v))


@named("caote", "Goel et al., CAOTE (arXiv 2504.14051)", "tokens whose eviction would change the attention output most")
def caote() -> Policy:
    """Return CAOTE: at each decode step each KV head keeps the B tokens with the largest `caote_error`.

    The weights alpha in `caote_error` are the attention of the last query, as in TOVA.

    The paper combines the CAOTE error with several existing policies. With H2O or SnapKV, the paper's alpha is the
    token's score divided by the sum of all scores. FastCAOTE, a variant in the paper, replaces the attention output X
    by the mean of the value vectors. The paper does not treat grouped-query attention. kvspec averages alpha over the
    query heads of a KV head.
    """
    return Policy(
        "caote", LayerScorer(Needs("all", 1, values=True), caote_score), even, top_units, SinkAndRecent(0, 0),
        Cadence(every=1), Granularity.HEAD,
    )
