"""Running a policy: five parts, one decision."""

from reference.policies.crystalcache import CrystalRecords, crystal_retention
from spec.budget import Budget
from spec.policy import Observation, Policy
from spec.records import CrystalRetention, Dissolution
from spec.retention import Retention

__all__ = ["retain"]


def retain(
    policy: Policy, budget: Budget, observation: Observation,
) -> tuple[Retention, CrystalRetention | None]:
    """What the policy keeps of one sequence, and CrystalCache's records where it is CrystalCache.

    The total is the budget's tokens, raised to the policy's floor; the parts run in the order protection, scorer,
    budgets, selector.
    """
    B = max(policy.floor, budget.tokens(observation.seen))
    protected = policy.protection(observation.seen)
    scores = policy.scorer(observation, protected)
    chosen = policy.selector(scores, policy.budgets(B, scores), protected)
    retention = Retention(chosen.positions, chosen.offsets, observation.seen, policy.granularity)
    if isinstance(scores.carry, CrystalRecords) and isinstance(chosen.records, Dissolution):
        return retention, crystal_retention(scores.carry, retention, chosen.records.ratio, B)
    return retention, None
