"""Plan of a request: when its tokens are evicted, and how many slots its tokens fill."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from models_integration.engines.vllm.arguments import RequestPolicy
from reference.policies.budgets import tokens_of
from reference.policies.kept import floor_reason, most_kept

__all__ = ["Compaction", "Plan", "Report", "Step"]


@dataclass(frozen=True)
class Compaction:
    """Job for the worker: move the kept tokens of a request from blocks (`source`) into private blocks (`target`)."""

    request_id: str
    event: int  # number of tokens of the request that the model has processed
    kept: int  # number of tokens that each set keeps
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Message of the worker about one decision."""

    event: int  # as in Compaction
    kept: int  # as in Compaction; -1 if the policy has failed
    eviction: dict[str, Any] | None = None  # entry of the statement; None if all tokens are kept, or it was sent before
    error: str | None = None  # message of the exception that the policy has raised


@dataclass(frozen=True)
class Step:
    """Message of the scheduler to the worker about one step: new requests with a plan, and jobs."""

    started: tuple[str, ...]
    jobs: tuple[Compaction, ...]


@dataclass
class Plan:
    """Plan of a request with a policy. The slot of a token is the position of the token minus `shift`.

    Attributes:
        asked: policy of the request.
        n: number of tokens in the prompt.
        shift: number of evicted tokens of each set.
        done: position of the last decision that was carried out. 0 before the first decision, and after a preemption.
        observed: number of tokens that the worker has processed, including tokens processed before a preemption.
        report: decision that the worker has made and the scheduler has not carried out.
        failed: number of tokens after which the policy has raised an error. Later, no token is evicted.
    """

    asked: RequestPolicy
    n: int
    shift: int = 0
    done: int = 0
    observed: int = 0
    report: Report | None = None
    failed: float = inf
    kept: int = field(init=False)

    def __post_init__(self) -> None:
        self.kept = most_kept(self.asked.policy, self.asked.budget, self.n)

    def budget(self, seen: int) -> int:
        """Return the number of tokens that a set keeps after `seen` tokens, before rounding to blocks."""
        return min(seen, tokens_of(self.asked.policy, self.asked.budget, seen))

    def is_event(self, seen: int) -> bool:
        """Return True if a decision follows after `seen` tokens: at the end of the prompt, or while decoding."""
        return seen < self.failed and (seen == self.n or (seen > self.n and self._due(seen)))

    def _due(self, seen: int) -> bool:
        if self.asked.every is None:
            return False
        due = self.asked.policy.cadence.due(seen, seen - self.shift, self.budget(seen))
        return due or self.asked.breathes(seen - self.n)

    def limit(self, done: int, tokens: int) -> int:
        """Return how many of the next `tokens` tokens one step may process: a step ends at each decision.

        While decoding, the worker reads each token that it has not seen before in a separate step.
        """
        assert self.done <= done, f"{self.shift} tokens count as evicted after {done} of {self.done} tokens"
        if done >= self.failed or (done >= self.n and self.asked.every is None):
            return tokens
        if done < self.n:
            return min(tokens, self.n - done)
        new = max(1, self.observed - done)
        ends = (seen for seen in range(done + 1, done + min(tokens, new) + 1) if self._due(seen))
        return min(tokens, new, next(ends, done + tokens) - done)

    def slots(self, tokens: int) -> int:
        """Return how many slots the first `tokens` tokens of the request fill."""
        return tokens - self.shift

    def full_reason(self, seen: int) -> str:
        """Return why a decision after `seen` tokens keeps all tokens. `/metrics` counts the text before the colon."""
        policy, stored = self.asked.policy, self.slots(seen)
        if self.asked.budget.tokens(seen) >= stored:
            return "the budget keeps all tokens"
        return "the policy keeps all tokens" + (f": {floor_reason(policy)}" if policy.floor >= stored else "")

    def peak(self, tokens: int) -> int:
        """Return the largest number of slots that the request fills until it has processed `tokens` tokens."""
        policy, every = self.asked.policy, self.asked.every
        if self.failed < inf or tokens <= self.n:
            return tokens - self.shift
        if every is None:
            return max(self.n, tokens - self.n + self.kept)
        return min(tokens, max(self.n, most_kept(policy, self.asked.budget, tokens) + every + policy.cadence.excess))

    def reusable_blocks(self, size: int) -> int:
        """Return how many blocks of a cached prefix the request may use.

        The forward pass must compute the queries that the policy reads, and may not skip the end of the prompt.
        """
        window = self.asked.window
        return 0 if window is None else max(0, self.n - max(1, window)) // size

    def carry_out(self, event: int, kept: int) -> None:
        """Record that the cache stores `kept` tokens per set after `event` tokens."""
        assert self.done < event, (self, event)
        assert 0 < kept <= event - self.shift, (self, kept)
        self.shift, self.done, self.report = event - kept, event, None
        if event == self.n:
            self.kept = kept

    def restart(self) -> None:
        """Record that the request was preempted: it starts again with an empty cache. Decisions stay made."""
        self.shift, self.done, self.report = 0, 0, None
