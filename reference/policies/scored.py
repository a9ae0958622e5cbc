"""A policy from a scoring function: who has a score needs no more for a policy of five parts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from reference.policies.budgets import Above, even
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Float64, Matrix
from spec.errors import SpecError
from spec.policy import SEGMENT_END, Needs, Observation, Policy, Promises, Scores
from spec.retention import Granularity

__all__ = ["EVERYTHING", "policy_from_score"]

EVERYTHING = Needs("all", None, values=True, token_ids=True)
"""Nothing is missing; but all of it is held until the prompt has been read."""
NOTHING = SinkAndRecent(0, 0)
_PROMISES = Promises(
    budget_exact="yes", protection_holds="yes", no_op_at_full_budget="yes", higher_score_never_loses="yes"
)
"""Of the parts that stand around the function; what hangs on the function itself is its author's to promise."""


@dataclass(frozen=True)
class _Function:
    """The function as a scorer of single tokens."""

    score: Callable[[Observation], Matrix]
    needs: Needs
    granularity: Granularity
    separable: bool

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        shape, found = (observation.groups, len(protected)), np.asarray(self.score(observation))
        if found.shape != shape or found.dtype.kind not in "fiub":
            given = f"{found.dtype} {found.shape}"
            raise SpecError("score", given, f"must be numbers, (kept sets, tokens) = {shape}")
        values: Float64[Matrix, "g n"] = found.astype(np.float64)
        if np.isnan(values[:, ~protected]).any():
            group, token = (int(at) for at in np.argwhere(np.isnan(values) & ~protected)[0])
            raise SpecError("score", "NaN", f"must be a number, and is none at kept set {group}, token {token}")
        by_head = self.granularity is Granularity.HEAD and self.needs.layers == "all"
        heads = len(next(iter(observation.layers.values())).k) if by_head else 1
        return Scores(values, np.arange(len(protected) + 1), heads=heads)


def policy_from_score(
    score: Callable[[Observation], Matrix], *, needs: Needs = EVERYTHING,
    granularity: Granularity = Granularity.HEAD, protection: SinkAndRecent = NOTHING,
    threshold: float | None = None, separable: bool = False,
) -> Policy:
    """A policy that keeps the tokens of the highest scores, B in each kept set; the lower token on a tie.

    Args:
        score: what `spec.policy.Observation` shows it of a prompt to scores (groups, n): a row for each kept set,
            layer major, a column for each cached token. The name of the function is the policy's.
        needs: what `score` reads; the less, the cheaper. What is not asked for is refused where it is read.
        granularity: whether the model, each layer, or each layer and KV head has a kept set of its own.
        protection: sinks and recent window, which no score evicts; a budget below them is raised to them.
        threshold: what scores no more than it goes, so that kept sets hold less than B where few tokens score more.
        separable: whether the scores of a kept set follow from its own layer (and head) alone, in any observation:
            then later turns are served too, where other sets have dropped other tokens.

    Raises:
        SpecError: for a threshold that is NaN; while it runs, for scores of another shape or kind, or NaN for a token
            that is not protected.
    """
    floor, name = protection.sink + protection.recent, getattr(score, "__name__", type(score).__name__)
    scorer = _Function(score, needs, granularity, separable)
    policy = Policy(name, scorer, even, top_units, protection, SEGMENT_END, granularity, floor, _PROMISES)
    if threshold is None:
        return policy
    if math.isnan(threshold):
        raise SpecError("threshold", threshold, "must be a number")
    promises = replace(_PROMISES, budget_exact="no", no_op_at_full_budget="no")
    return replace(policy, budgets=Above(threshold), promises=promises)
