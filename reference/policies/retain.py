"""Running a policy: five parts, one decision."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.policies.crystalcache import CrystalRecords, crystal_retention
from reference.policies.selectors import touched_units
from reference.policies.shown import shown_to
from spec.arrays import BoolVector
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Observation, Policy, Scores, Selection
from spec.records import CrystalRetention, Dissolution
from spec.retention import Retention

__all__ = ["chosen", "retain", "retain_each", "tokens_of"]


def retain(
    policy: Policy, budget: Budget, observation: Observation,
) -> tuple[Retention, CrystalRetention | None]:
    """What the policy keeps of one sequence, and CrystalCache's records where it is CrystalCache.

    The parts run in the order protection, scorer, budgets, selector.

    Implements: PO-RETAIN

    Raises:
        SpecError: when a group's share does not hold its protected tokens, or a part refuses its input.
    """
    (only,) = retain_each(policy, (budget,), observation)
    return only


def retain_each(
    policy: Policy, budgets: Sequence[Budget], observation: Observation,
) -> list[tuple[Retention, CrystalRetention | None]]:
    """The same for each of several budgets. The scorer runs once, unless its scores depend on the budget.

    Raises:
        SpecError: as `retain`.
    """
    protected, scores, found = policy.protection(observation.seen), None, []
    observation = shown_to(policy.scorer.needs, observation)
    for B in (tokens_of(policy, budget, observation.seen) for budget in budgets):
        if scores is None or policy.scorer.needs.budget:
            scores = policy.scorer(replace(observation, B=B), protected)
        found.append(_retained(policy, B, observation.seen, scores, protected))
    return found


def _retained(
    policy: Policy, B: int, seen: int, scores: Scores, protected: BoolVector,
) -> tuple[Retention, CrystalRetention | None]:
    selection = chosen(policy, B, scores, protected)
    retention = Retention(selection.positions, selection.offsets, seen, policy.granularity)
    if isinstance(scores.carry, CrystalRecords) and isinstance(selection.records, Dissolution):
        return retention, crystal_retention(scores.carry, retention, selection.records.ratio, B)
    return retention, None


def tokens_of(policy: Policy, budget: Budget, seen: int) -> int:
    """B, tokens that a group keeps on average: the budget's, raised to the policy's floor."""
    return max(policy.floor, budget.tokens(seen))


def chosen(policy: Policy, B: int, scores: Scores, protected: BoolVector) -> Selection:
    """The selection under a total of B tokens a group; a protected unit has no score."""
    pinned = touched_units(protected, scores.offsets)
    if pinned.any():
        scores = replace(scores, values=np.where(pinned, np.nan, scores.values))
    shares = policy.budgets(B * len(scores.values), scores)
    if (shares < protected.sum()).any():
        raise SpecError("budget", B, f"must hold the {int(protected.sum())} protected tokens of {policy.name}")
    return policy.selector(scores, shares, protected)
