"""KeyDiff keeps keys that point away from the mean direction of all keys."""

import numpy as np

from reference.directions import unit_keys
from reference.policies.attention import wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["keydiff", "keydiff_score"]


def keydiff_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """Return minus the cosine similarity of each key to the mean unit key. If the mean is 0, all scores are 0.

    Implements: PO-KEYDIFF

    Source: KeyDiff, Section 3.
    """
    unit = unit_keys(wide(view.k))
    anchor = unit.mean(axis=1, keepdims=True)
    length = np.sqrt((anchor * anchor).sum(axis=2))
    dot = (unit * anchor).sum(axis=2)
    cosine: Matrix = np.divide(dot, length, out=np.zeros_like(dot), where=length > 0)
    return -cosine


@named(
    "keydiff", "Park et al., KeyDiff (arXiv 2504.15364)", "tokens whose keys differ most from the mean of all keys"
)
def keydiff() -> Policy:
    """Return KeyDiff: each KV head keeps the B keys least similar to the anchor (the mean unit key).

    The policy evicts once, at the end of the prompt. The paper evicts after each block of 128 tokens of the prompt. To
    evict after each block, pass the blocks as segments. EpiCache has a version of KeyDiff with one anchor for all
    heads. Qualcomm's implementation of KeyDiff does not normalise the keys.
    """
    return Policy(
        "keydiff", LayerScorer(Needs("all", query_rows=0), keydiff_score), even, top_units, SinkAndRecent(0, 0),
        granularity=Granularity.HEAD,
    )
