"""Policy prepared for a model, with a budget and with rules for the time after a prompt."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from models_integration.cache.continuation import Decision, ObservedRows
from models_integration.cache.retained_cache import RetainedCache
from spec.backend import Backend
from spec.budget import Budget
from spec.policy import Needs, Policy

__all__ = ["ContinuationRule", "Method"]


class ContinuationRule(Protocol):
    """Rules of a kind of policy for prompts, later segments and decode steps. The cache contains the state."""

    @property
    def step_needs(self) -> Needs:
        """Tensors of a decode step that the rule needs."""
        ...

    @property
    def decode(self) -> bool:
        """True if forward passes of one token in a stream are decode steps. If False, the tokens belong to segments."""
        ...

    @property
    def segment_tokens(self) -> int | None:
        """Number of tokens in a segment of a stream. None if the policy is not a stream."""
        ...

    def decide_prompt(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Select the kept tokens of first prompts."""
        ...

    def check_turn(self, policy: Policy, cache: RetainedCache) -> None:
        """Raise a SpecError if no later segment can follow."""
        ...

    def check_padded(self, policy: Policy, cache: RetainedCache) -> None:
        """Raise a SpecError if no later segment with padding can follow."""
        ...

    def flush_pending(self, cache: RetainedCache) -> None:
        """Before a later segment, update the state of the policy in the cache to include all tokens seen so far."""
        ...

    def decide_turn(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Select the kept tokens of later segments."""
        ...

    def before_step(self, policy: Policy, cache: RetainedCache) -> None:
        """Prepare a decode step. Raise a SpecError if no decode step can follow."""
        ...

    def after_step(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows | None,
    ) -> None:
        """Update the cache after a decode step of tokens (rows, 1). `observed` has the tensors of `step_needs`."""
        ...

    def before_reading(self, policy: Policy, cache: RetainedCache) -> None:
        """Prepare tokens after which nothing is evicted. Raise a SpecError if no tokens can follow."""
        ...

    def after_reading(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows,
    ) -> None:
        """Update the state after tokens (rows, n) were appended to the cache without eviction."""
        ...


@dataclass(frozen=True)
class Method:
    """Policy with a budget, prepared for one model."""

    policy: Policy
    budget: Budget
    backend: str
    """Name of the backend that the policy uses."""
    continuation: ContinuationRule
    """Rules for prompts, later segments and decode steps."""
    engine: Backend | None = None
    """Backend whose functions return scores and selections as tensors on the device. None: no such backend."""
