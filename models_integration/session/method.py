"""A method on its way to a model: a policy, its budget, and how a cache goes on under it."""

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
    """How a cache starts and goes on under a kind of policy; what it goes on from is in the cache."""

    @property
    def step_needs(self) -> Needs:
        """What a decode step must be shown."""
        ...

    @property
    def decode(self) -> bool:
        """Whether decode steps count in a stream; otherwise their tokens belong to its segments."""
        ...

    @property
    def segment_tokens(self) -> int | None:
        """Tokens of a stream's segment; None where segments end with their forwards."""
        ...

    def decide_prompt(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Decide about first prompts."""
        ...

    def check_turn(self, policy: Policy, cache: RetainedCache) -> None:
        """Raise a SpecError where no later segment can follow."""
        ...

    def check_padded(self, policy: Policy, cache: RetainedCache) -> None:
        """Raise a SpecError where no later segment with padding can follow."""
        ...

    def flush_pending(self, cache: RetainedCache) -> None:
        """What the cache goes on from is about all that it has seen: a later segment comes."""
        ...

    def decide_turn(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Decide about later segments."""
        ...

    def before_step(self, policy: Policy, cache: RetainedCache) -> None:
        """A decode step comes; raise a SpecError where none can follow."""
        ...

    def after_step(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows | None,
    ) -> None:
        """The tokens (rows, 1) of a decode step are in the cache; what it showed, where there are step_needs."""
        ...

    def before_reading(self, policy: Policy, cache: RetainedCache) -> None:
        """Tokens come that nobody decides about; raise a SpecError where none can follow."""
        ...

    def after_reading(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows,
    ) -> None:
        """The tokens (rows, n) are in the cache, and nothing is decided."""
        ...


@dataclass(frozen=True)
class Method:
    """A policy with its budget, ready for one model."""

    policy: Policy
    budget: Budget
    backend: str
    """The name of the backend that the policy's parts use."""
    continuation: ContinuationRule
    """How a cache goes on after a prompt."""
    engine: Backend | None = None
    """The backend whose functions leave scores and choices on the device, where it has any."""
