"""Policies that evict while decoding, such as H2O, TOVA and R-KV. The scorer's records of each row are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from models_integration.cache.continuation import Decision, Nothing, ObservedRows
from models_integration.cache.retained_cache import RetainedCache
from reference.policies import advance, advance_turn, start
from reference.policies.cadences import join, take_up
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs, Policy, Running
from spec.retention import Retention

__all__ = ["DecideInSteps", "ScorerRecords", "join_layers"]


@dataclass(frozen=True)
class ScorerRecords:
    """Records of a policy's scorer for all rows of a batch, and the name of the policy."""

    policy: str
    rows: tuple[Running, ...]

    def select(self, rows: Tensor) -> "ScorerRecords":
        """Return the records of the rows of the batch with these indices."""
        return ScorerRecords(self.policy, tuple(self.rows[row] for row in rows.tolist()))

    def crop(self, tokens: int) -> "ScorerRecords | Nothing":
        """Return Nothing, because the attention of removed tokens cannot be subtracted from sums."""
        return Nothing() if tokens else self


@dataclass(frozen=True)
class DecideInSteps:
    """Rule for policies whose scorer has a method `step`. After each decode step, the policy can evict.

    Attributes:
        step_needs: tensors that the scorer needs in a decode step.
    """

    step_needs: Needs
    decode: ClassVar[bool] = True
    segment_tokens: ClassVar[int | None] = None

    def decide_prompt(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Decide about first prompts, and make the records of the kept tokens."""
        return _decision(policy, [
            start(policy, budget, observed.prompt(row, policy.granularity)) for row in observed.prompts
        ])

    def check_turn(self, policy: Policy, cache: RetainedCache) -> None:
        """Check that the records belong to this policy, and include all tokens that the cache stores.

        Raises:
            SpecError: if a condition fails.
        """
        records, name = cache.continuation, policy.name
        if not isinstance(records, ScorerRecords) or records.policy != name:
            raise SpecError("past_key_values", "tokens without records", f"{name} needs a cache that {name} has made")
        stored = [len(cache.full_layers[0].head_positions(row, 0)) for row in range(len(records.rows))]
        if stored != [running.live.shape[1] for running in records.rows]:
            raise SpecError("past_key_values", "tokens without records", f"{name} has not read the last tokens")

    before_step = before_reading = check_turn

    def check_padded(self, policy: Policy, cache: RetainedCache) -> None:
        """Reject padded turns.

        Raises:
            SpecError: always.
        """
        raise SpecError(
            "attention_mask", "zeros", "padded turns need a policy that keeps one set for the whole model and decides"
            " at ends of segments; otherwise pass turns of equal length"
        )

    def decide_turn(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Decide about later segments. Each token changes the records as in a decode step."""
        before = observed.continuation
        assert isinstance(before, ScorerRecords)
        return _decision(policy, [
            advance_turn(policy, budget, before.rows[row], observed.stored(row, policy.granularity), observed.columns)
            for row in observed.prompts
        ])

    def flush_pending(self, cache: RetainedCache) -> None:
        """Do nothing, because records include every token immediately."""

    def after_step(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows | None,
    ) -> None:
        """Finish a decode step: decide for each row separately, then compact the cache."""
        before, granularity = cache.continuation, policy.granularity
        assert observed is not None
        assert isinstance(before, ScorerRecords)
        retentions, after, due = [], [], []
        for row, running in enumerate(before.rows):
            observation = observed.stored(row, granularity)
            retention, now = advance(policy, budget, running, observation)
            retentions.append(retention or _all_live(policy, now, observation.seen))
            after.append(now)
            due.append(retention is not None)
        if any(due):
            cache.compact(retentions)
        cache.continuation = ScorerRecords(policy.name, tuple(after))

    def after_reading(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows,
    ) -> None:
        """Add tokens (rows, n) to the records as in decode steps, without eviction."""
        before, granularity = cache.continuation, policy.granularity
        assert isinstance(before, ScorerRecords)
        cache.continuation = ScorerRecords(policy.name, tuple(
            take_up(policy, budget, running, observed.stored(row, granularity), ids.shape[1])
            for row, running in enumerate(before.rows)
        ))


def join_layers(policy: Policy, parts: Sequence[Decision]) -> Decision:
    """Join the decisions about single layers of a prompt, in ascending order of layers, into one decision."""
    retentions = tuple(map(Retention.join, zip(*(part.retentions for part in parts), strict=True)))
    records = [part.continuation for part in parts if isinstance(part.continuation, ScorerRecords)]
    if not records:
        return Decision(retentions)
    rows = zip(*(one.rows for one in records), strict=True)
    return Decision(retentions, ScorerRecords(policy.name, tuple(join(policy, row) for row in rows)))


def _decision(policy: Policy, rows: Sequence[tuple[Retention, Running]]) -> Decision:
    retentions, running = zip(*rows, strict=True)
    return Decision(retentions, ScorerRecords(policy.name, running))


def _all_live(policy: Policy, running: Running, seen: int) -> Retention:
    groups, live = running.live.shape
    return Retention(running.live.ravel(), live * np.arange(groups + 1), seen, policy.granularity)
