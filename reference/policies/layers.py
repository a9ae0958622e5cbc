"""Layer-by-layer eviction: a layer evicts right after its attention step. The policy must decide layers separately."""

from dataclasses import dataclass, replace

import numpy as np

from reference.policies.budgets import Above, Adaptive, Competition, Pyramid, even, everything
from reference.policies.cake import Cake, Preferred
from reference.policies.kvzip_heads import FullHeads
from reference.policies.selectors import top_units
from spec.arrays import Int64, IntVector
from spec.policy import Budgets, JoiningScorer, LayerwiseScorer, Policy, Scores
from spec.retention import Granularity

__all__ = ["is_cascading", "is_layerwise", "policy_of_layer"]


def is_layerwise(policy: Policy) -> bool:
    """Return True if the kept tokens of each layer depend only on queries, keys and values of this layer.

    The result is also False if the policy's budgets function is not defined in `reference.policies`.
    """
    scorer, needs, budgets = policy.scorer, policy.scorer.needs, policy.budgets
    if policy.granularity is Granularity.MODEL or needs.layers != "all" or needs.rehearsal is not None:
        return False
    if not (isinstance(scorer, LayerwiseScorer) and scorer.layerwise):
        return False
    if policy.cadence.every is not None:
        return budgets is even and isinstance(scorer, JoiningScorer)
    return budgets in (even, everything) or isinstance(budgets, Above | Adaptive | Competition | Pyramid | FullHeads)


def is_cascading(policy: Policy) -> bool:
    """Return True if a token that leaves a layer's share, after some layers, cannot return after more layers: CAKE.

    The shares of a layer then only shrink while the model reads a prompt (CAKE, Algorithm 1).
    """
    parts = isinstance(policy.scorer, Cake) and isinstance(policy.budgets, Preferred) and policy.selector is top_units
    return parts and policy.granularity is Granularity.HEAD and policy.cadence.every is None


def policy_of_layer(policy: Policy, at: int, L: int) -> Policy:
    """Return the policy for one layer of a layerwise policy: the layer with index `at` of L layers.

    Implements: PO-RETAIN
    """
    if not isinstance(policy.budgets, Pyramid | FullHeads):
        return policy
    return replace(policy, budgets=_OfLayer(policy.budgets, at, L))


@dataclass(frozen=True)
class _OfLayer:
    """One layer's part of budgets that depend only on the numbers of layers, heads and tokens, not on scores."""

    budgets: Budgets
    at: int
    L: int

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        groups, m = scores.values.shape
        unread = np.broadcast_to(np.nan, (self.L * groups, m))
        shares = self.budgets(self.L * total, replace(scores, values=unread))
        return shares[self.at * groups : (self.at + 1) * groups]
