"""Policies that keep or evict whole blocks of tokens. Paged caches need such policies, because tokens cannot move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from reference.policies.criticalkv import two_stages
from reference.policies.scorers import check_positive
from reference.policies.selectors import Choice, best_blocks, best_tokens, recent_half, top_tokens, top_units
from spec.arrays import BoolVector, IntVector
from spec.composition import Required, required_by
from spec.errors import SpecError
from spec.policy import Policy, Scores, Selection

__all__ = ["InBlocks", "in_blocks"]


@dataclass(frozen=True)
class InBlocks:
    """Selector that selects whole blocks of tokens instead of the single tokens that the host policy selects."""

    select: Callable[..., Selection]
    choose: Choice

    @property
    def required(self) -> Required:
        """Return what the host's selector needs. Sets keep whole blocks, so they can keep less than their shares."""
        return replace(required_by(self.select) or Required(), exact=False)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        return self.select(scores, budgets, protected, choose=self.choose)


def in_blocks(host: Policy, b: int) -> Policy:
    """Return the host policy with a selector that keeps whole blocks of b tokens. The host's scores do not change.

    Blocks are runs of b successive cached tokens, counted from the first cached token. If every eviction removes whole
    blocks, the absolute positions in each block are also consecutive. Only the last block can have fewer than b tokens.

    Implements: PO-BLOCKS

    Raises:
        SpecError: if b is below 1, or if the host does not select single tokens by their scores.
    """
    select = getattr(host.selector, "func", host.selector)
    if select not in (top_units, top_tokens, recent_half, two_stages):
        reason = "must choose single tokens by their scores: chunks, trunks and sets are chosen otherwise"
        raise SpecError("host", host.name, reason)
    token = getattr(host.selector, "keywords", {}).get("choose", best_tokens)
    selector = InBlocks(
        top_tokens if select is top_units else host.selector,
        partial(best_blocks, b=check_positive("block", b), choose=token),
    )
    promises = replace(host.promises, budget_exact="no", higher_score_never_loses="no")
    return replace(
        host, name=f"blocks({host.name})", selector=selector, least=max(host.least or 0, b), promises=promises
    )
