"""Layer-by-layer eviction: a layer evicts right after its attention step. The policy must decide layers separately."""

from dataclasses import dataclass, replace

import numpy as np

from reference.policies.budgets import LayersThenHeads
from reference.policies.selectors import top_units
from spec.arrays import Int64, IntVector
from spec.composition import Required, Shares, provided_by, required_by
from spec.policy import Budgets, JoiningScorer, LayerwiseScorer, Policy, Scores, SeparableScorer
from spec.retention import Granularity

__all__ = ["decides_again", "is_cascading", "is_layerwise", "policy_of_layer"]


def is_layerwise(policy: Policy) -> bool:
    """Return True if the kept tokens of each layer depend only on queries, keys and values of this layer.

    The result is also False if the policy's budgets do not declare what the shares depend on.
    """
    scorer, needs, shares = policy.scorer, policy.scorer.needs, _shares(policy)
    if policy.granularity is Granularity.MODEL or needs.layers != "all" or needs.rehearsal is not None:
        return False
    if not (isinstance(scorer, LayerwiseScorer) and scorer.layerwise):
        return False
    if policy.cadence.every is not None:
        return shares == "equal" and isinstance(scorer, JoiningScorer)
    return shares in ("equal", "everything", "layer", "counts")


def is_cascading(policy: Policy) -> bool:
    """Return True if a layer's share only shrinks while the model processes more layers of the prompt, as in CAKE.

    A token that leaves the share then never returns, so the layer can evict the token at once (CAKE, Algorithm 1).
    """
    scorer = provided_by(policy.scorer)
    parts = scorer is not None and scorer.preferences and _shares(policy) == "preferences"
    parts = parts and policy.selector is top_units and policy.cadence.every is None
    return parts and policy.granularity is Granularity.HEAD


def decides_again(policy: Policy) -> bool:
    """Return True if the policy can evict again after its sets of kept tokens have become different."""
    scorer = policy.scorer
    if scorer.needs.hidden:
        return False
    if scorer.needs.rehearsal is not None or policy.cadence.every is not None:
        return scorer.needs.rehearsal is None
    return policy.granularity is Granularity.MODEL or (isinstance(scorer, SeparableScorer) and scorer.separable)


def _shares(policy: Policy) -> Shares:
    required = required_by(policy.budgets)
    return "unknown" if required is None else required.shares


def policy_of_layer(policy: Policy, at: int, L: int) -> Policy:
    """Return the policy for one layer of a layerwise policy: the layer with index `at` of L layers.

    Implements: PO-RETAIN
    """
    budgets = policy.budgets
    if _shares(policy) != "counts":
        return policy
    if isinstance(budgets, LayersThenHeads):
        return replace(policy, budgets=replace(budgets, layers=_OfLayer(budgets.layers, at, L)))
    return replace(policy, budgets=_OfLayer(budgets, at, L))


@dataclass(frozen=True)
class _OfLayer:
    """One layer's part of budgets that depend only on the numbers of layers, heads and tokens, not on scores."""

    budgets: Budgets
    at: int
    L: int

    @property
    def required(self) -> Required:
        """Return what the budgets need. The size of the window was checked with all layers."""
        return replace(required_by(self.budgets) or Required(), window=None)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        groups, m = scores.values.shape
        unread = np.broadcast_to(np.nan, (self.L * groups, m))
        shares = self.budgets(self.L * total, replace(scores, values=unread))
        return shares[self.at * groups : (self.at + 1) * groups]
