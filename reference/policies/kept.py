"""Numbers of kept tokens beside the budget, and the reason why a policy keeps more tokens than the budget."""

from dataclasses import dataclass
from typing import Any
from warnings import warn

import numpy as np

from reference.policies.blocks import InBlocks
from reference.policies.budgets import tokens_of
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import Dissolve
from spec.budget import Budget, parse_budget
from spec.policy import Policy, Protection
from spec.records import CrystalRetention
from spec.retention import Retention

__all__ = ["KeptTokens", "count_kept", "excess_tokens", "floor_reason", "most_kept", "warn_small_budget"]


@dataclass(frozen=True)
class KeptTokens:
    """Numbers of tokens that a policy keeps of one sequence, beside the budget.

        print(run.kept_tokens[0])   # 32 of 100 tokens, budget 20: snapkv always keeps the last 32 tokens

    Attributes:
        seen: number of tokens of the sequence.
        least: number of tokens in the smallest set of kept tokens.
        most: number of tokens in the largest set of kept tokens.
        mean: mean number of tokens in a set of kept tokens.
        budget: budget in tokens for each set, as the user gave the budget.
        floor: number of tokens that the policy keeps of this sequence at any budget.
        over_budget: mean number of kept tokens minus the budget, rounded up, and at least 0.
        reason: sentence about the tokens above the budget. Empty if the mean does not exceed the budget.
    """

    seen: int
    least: int
    most: int
    mean: float
    budget: int
    floor: int
    over_budget: int
    reason: str

    def __str__(self) -> str:
        sizes = f"{self.most}" if self.least == self.most else f"{self.least} to {self.most} (mean {self.mean:.1f})"
        return f"{sizes} of {self.seen} tokens, budget {self.budget}{': ' if self.reason else ''}{self.reason}"


def count_kept(policy: Policy, budget: Budget, retention: Retention) -> KeptTokens:
    """Count the kept tokens of one sequence, and compare the numbers with the budget that the user gave."""
    sizes, asked = np.diff(retention.offsets), budget.tokens(retention.seen)
    floor = min(policy.floor, retention.seen)
    if isinstance(retention, CrystalRetention):
        floor = int(retention.trunks.sizes[retention.protected].sum())
    over = excess_tokens(budget, retention)
    reason = _reason(policy, retention, asked, floor) if over else ""
    most, mean = int(sizes.max()), float(sizes.mean())
    return KeptTokens(retention.seen, int(sizes.min()), most, mean, asked, floor, over, reason)


def excess_tokens(budget: Budget, retention: Retention) -> int:
    """Return the mean number of kept tokens of a set minus the budget that the user gave, rounded up, at least 0."""
    return max(0, -(-len(retention.positions) // retention.groups) - budget.tokens(retention.seen))


def most_kept(policy: Policy, budget: Budget, seen: int) -> int:
    """Return the largest mean number of tokens that the sets of kept tokens can have after `seen` tokens.

    The policy keeps whole blocks or trunks that contain protected tokens, so the number can exceed the budget.
    """
    beside = 2 * (_largest_unit(policy.selector) - 1)  # at the end of the first tokens, and before the last ones
    return min(seen, max(tokens_of(policy, budget, seen), policy.protection.size + beside))


def _largest_unit(selector: Any) -> int:
    """Return the largest number of tokens that a selector keeps or evicts together."""
    if isinstance(selector, Dissolve):
        return selector.parameters.T_max
    blocks = selector.choose if isinstance(selector, InBlocks) else selector
    size: int = getattr(blocks, "keywords", {}).get("b", 1)
    return size


def floor_reason(policy: Policy) -> str:
    """Return a sentence about the tokens that a policy keeps at any budget."""
    protected = _protected(policy.protection)
    if protected and policy.floor <= policy.protection.size:
        return f"{policy.name} always keeps {protected} tokens"
    return f"{policy.name} always keeps at least {policy.floor} tokens"


def warn_small_budget(budget: float | int | str | Budget, policy: Policy) -> None:
    """Warn if a number of tokens is 1 or less than the policy always keeps, because a fraction may be meant.

    A `Budget` object and a fraction give no warning, because their unit is stated.
    """
    count = None if isinstance(budget, Budget) else parse_budget(budget).count
    if count == 1:
        warn(f"budget={budget!r} keeps one token; write budget=1.0 to keep the whole prompt", stacklevel=4)
    elif count is not None and count < policy.floor:
        share = f"; write budget={count / 100:g} to keep {count} % of the prompt" if count <= 100 else ""
        warn(f"budget={budget!r} is a number of tokens, but {floor_reason(policy)}{share}", stacklevel=4)


def _reason(policy: Policy, retention: Retention, asked: int, floor: int) -> str:
    protected = _protected(policy.protection)
    if isinstance(retention, CrystalRetention) and floor > policy.floor:
        return f"{policy.name} always keeps the whole trunks of {protected} tokens, here {floor} tokens"
    inexact = "does not promise an exact budget"
    if asked >= policy.floor:
        return f"{policy.name} {inexact}"
    return floor_reason(policy) + (f", and {inexact}" if len(retention.positions) > floor * retention.groups else "")


def _protected(protection: Protection) -> str:
    """Return the protected tokens in words, such as "the first 4 and the last 128"."""
    if not isinstance(protection, SinkAndRecent):
        return ""
    parts = [
        f"the {end} {count}" for end, count in (("first", protection.sink), ("last", protection.recent)) if count
    ]
    return " and ".join(parts)
