"""TOVA: the last query decides, in every step, for all heads of a layer at once."""

from reference.policies.attention import observed_attention
from reference.policies.budgets import even
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import Cadence, LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["tova", "tova_score"]


def tova_score(view: LayerView) -> Float64[Matrix, "one n"]:
    """The last query's attention on every key, its own included, averaged over all query heads.

    Implements: PO-TOVA

    Source: TOVA, Section 3.2.
    """
    mean: Matrix = observed_attention(view, 1).mean(axis=0)
    return mean


def tova() -> Policy:
    """Per layer the B best keys, in every step; no token is protected, and the newest may go.

    kvpress decides once, after the prompt, and never evicts the last token.
    """
    return Policy(
        "tova", LayerScorer(Needs("all", 1), tova_score), even, top_units, SinkAndRecent(0, 0), Cadence(every=1),
        Granularity.LAYER,
    )
