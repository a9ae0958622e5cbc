"""FullCache keeps every token. FullCache serves as the upper bound in comparisons."""

from reference.policies.budgets import everything
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import recency
from reference.policies.selectors import top_units
from spec.policy import Policy, Promises

__all__ = ["full_cache"]


@named("fullcache", "", "all tokens; serves as the upper bound in a comparison", diverse=False, blocks=False)
def full_cache() -> Policy:
    """Return the policy that keeps all tokens for any budget."""
    promises = Promises("no", "N/A", "yes", "N/A", "yes", "N/A", "N/A")
    return Policy("fullcache", recency, everything, top_units, SinkAndRecent(0, 0), promises=promises)
