"""Policies without state that decide at the end of each segment, such as SnapKV and StreamingLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from models_integration.cache.continuation import Decision, ObservedRows
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from reference.policies import retain, retain_turn
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs, Policy, SeparableScorer
from spec.retention import Granularity, Retention

__all__ = ["DecideAnew"]


@dataclass(frozen=True)
class DecideAnew:
    """Rule for policies that decide at the end of each segment from all tokens stored by then."""

    step_needs: ClassVar[Needs] = Needs()
    decode: ClassVar[bool] = False
    segment_tokens: ClassVar[int | None] = None

    def decide_prompt(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Decide about first prompts."""
        decided = [retain(policy, budget, observed.prompt(row, policy.granularity)) for row in observed.prompts]
        records = tuple(records for _, records in decided if records is not None)
        return Decision(tuple(retention for retention, _ in decided), records=records)

    def check_turn(self, policy: Policy, cache: RetainedCache) -> None:
        """Check that the policy can decide about a later segment.

        Raises:
            SpecError: if the policy needs the ids of all stored tokens, if layers or heads store different tokens than
                the policy's sets of kept tokens, or if the scores compare neighbouring tokens and tokens in between
                were evicted.
        """
        if policy.scorer.needs.token_ids:
            reason = "evicts from the first prompt only: read later text inside `with run.reading():`"
            raise SpecError("policy", policy.name, reason)
        if cache.layers_differ:
            _check_own_sets(policy, cache.full_layers)

    def check_padded(self, policy: Policy, cache: RetainedCache) -> None:
        """Check that the policy accepts a padded turn: the whole model must have one set of kept tokens.

        Raises:
            SpecError: if layers or heads have separate sets.
        """
        if policy.granularity is not Granularity.MODEL or cache.layers_differ:
            raise SpecError(
                "attention_mask", "zeros", "padded turns need a policy that keeps one set for the whole model and"
                " decides at ends of segments; otherwise pass turns of equal length"
            )

    def decide_turn(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Decide about later segments, from the tokens that each set of kept tokens stores."""
        return Decision(tuple(self._turn(policy, budget, observed, row) for row in observed.prompts))

    def _turn(self, policy: Policy, budget: Budget, observed: ObservedRows, row: int) -> Retention:
        live, shown = observed.kept_sets(row, policy.granularity)
        return retain_turn(policy, budget, live, shown, observed.sets_of_a_layer(policy.granularity))

    def flush_pending(self, cache: RetainedCache) -> None:
        """Do nothing, because no token is pending."""

    def before_step(self, policy: Policy, cache: RetainedCache) -> None:
        """Accept the token, because every cache can grow."""

    def after_step(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows | None,
    ) -> None:
        """Do nothing. The cache stores the decoded token."""

    def before_reading(self, policy: Policy, cache: RetainedCache) -> None:
        """Accept the token, because every cache can grow."""

    def after_reading(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows,
    ) -> None:
        """Do nothing. The cache stores the tokens."""


def _check_own_sets(policy: Policy, layers: Sequence[RetainedLayer]) -> None:
    """Check that each set of kept tokens can be scored alone, if layers store different tokens."""
    scorer = policy.scorer
    if policy.granularity is Granularity.MODEL:
        raise SpecError(
            "past_key_values", "layers that differ", f"{policy.name} needs the same tokens in all layers and heads"
        )
    if policy.granularity is Granularity.LAYER and any(map(_heads_differ, layers)):
        raise SpecError("past_key_values", "heads that differ", f"{policy.name} needs the same tokens in all heads")
    if not (isinstance(scorer, SeparableScorer) and scorer.separable):
        reason = (
            "evicts from the first prompt only, because the policy compares the tokens of different layers or heads:"
            " read later text inside `with run.reading():`"
        )
        raise SpecError("policy", policy.name, reason)


def _heads_differ(layer: RetainedLayer) -> bool:
    sets = [[layer.head_positions(row, head).tolist() for head in range(layer.heads)] for row in range(layer.batch)]
    return isinstance(layer, RaggedLayer) and any(own != heads[0] for heads in sets for own in heads)
