"""FullCache: nothing is evicted; the upper bound of every comparison."""

from reference.policies.budgets import everything
from reference.policies.protections import SinkAndRecent
from reference.policies.recency import recency
from reference.policies.selectors import top_units
from spec.policy import Policy

__all__ = ["full_cache"]


def full_cache() -> Policy:
    """Keeps all tokens, whatever the budget."""
    return Policy("fullcache", recency, everything, top_units, SinkAndRecent(0, 0))
