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

    The returned change is inf if alpha_j is 1.

    Implements: PO-CAOTE

    Source: CAOTE, Theorem 3.2; CrystalCache, Eq. 7. alpha plus the weight of an attention sink sums to 1. The value
    vector of an attention sink is 0.
    """
    X = (alpha[:, :, None] * v).sum(axis=1, keepdims=True)
    distance = np.sqrt(((X - v) ** 2).sum(axis=2))
    rest = 1.0 - alpha
    error: Matrix = np.divide(alpha * distance, rest, out=np.full_like(alpha, np.inf), where=rest > 0)
    return error


def caote_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """Return `caote_error` of each key. alpha is the attention of the last query, averaged over the group.

    Implements: PO-CAOTE

    Raises:
        SpecError: if the values were not captured.
    """
    if view.v is None:
        raise SpecError("v", None, "is needed, because CAOTE reads the values")
    return caote_error(group_mean(observed_attention(view, 1)[:, 0], len(view.k)), wide(view.v))


@named("caote", "Goel et al., CAOTE (arXiv 2504.14051)", "tokens whose eviction would change the attention output most")
def caote() -> Policy:
    """Return CAOTE: at every step each KV head keeps the B tokens with the largest `caote_error`.

    alpha is the attention of the last query, as in TOVA.

    The paper adds the CAOTE error to several existing policies. If the existing policy is H2O or SnapKV, alpha is the
    token's score divided by the sum of all scores. FastCAOTE in the paper uses the mean of the value vectors as X. The
    paper has no rule for grouped-query attention: kvspec averages alpha over the group.
    """
    return Policy(
        "caote", LayerScorer(Needs("all", 1, values=True), caote_score), even, top_units, SinkAndRecent(0, 0),
        Cadence(every=1), Granularity.HEAD,
    )
