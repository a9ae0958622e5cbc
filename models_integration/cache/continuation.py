"""Decision of a policy about the rows of a cache, and state of the policy for later decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spec.arrays import Int64, IntVector
from spec.policy import Observation
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

__all__ = ["Continuation", "Decision", "Nothing", "ObservedRows"]


class Continuation(Protocol):
    """Immutable state of a policy between two decisions, for all rows of a cache."""

    def select(self, rows: Tensor) -> "Continuation":
        """Return the state for the rows of the batch with these indices."""
        ...

    def crop(self, tokens: int) -> "Continuation":
        """Return the state without the last `tokens` tokens, or Nothing if these tokens cannot be removed."""
        ...


@dataclass(frozen=True)
class Nothing:
    """State of a policy that stores nothing. The next decision is computed from all tokens stored by then."""

    def select(self, rows: Tensor) -> "Nothing":
        """Return the same empty state."""
        return self

    def crop(self, tokens: int) -> "Nothing":
        """Return the same empty state."""
        return self


@dataclass(frozen=True)
class Decision:
    """Decision of a policy: the kept tokens of each prompt, or of each row of a later segment."""

    retentions: tuple[Retention, ...]
    """Kept tokens, one entry for each prompt."""
    continuation: Continuation = Nothing()
    """State of the policy for the cache after the compaction, with a row for each prompt."""
    records: tuple[CrystalRetention, ...] = ()
    """Full results of CrystalCache for a first prompt. Empty for all other policies and for later segments."""
    over_budget: int = 0
    """Number of tokens kept beyond the budget in all prompts, because the protected tokens alone exceed the budget."""
    padding: Tensor | None = None
    """Number of padding columns on the left of each prompt, (rows,), if a first prompt is padded."""


class ObservedRows(Protocol):
    """Data of a segment that the model has processed, for the policy's decision. Rows with equal prompts count once."""

    @property
    def columns(self) -> int:
        """Number of columns of the segment, including padding."""
        ...

    @property
    def continuation(self) -> Continuation:
        """State of the policy before the decision about this segment."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """Rows for which the policy decides."""
        ...

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        """Return the observation of a first prompt, without padding."""
        ...

    def stored(self, row: int, granularity: Granularity) -> Observation:
        """Return the observation of a later segment over all cached tokens. Heads must store equally many tokens."""
        ...

    def kept_sets(
        self, row: int, granularity: Granularity,
    ) -> tuple[list[Int64[IntVector, " _"]], list[Observation]]:
        """Return each set's stored positions in a later segment, and one observation of all sets or one per set."""
        ...

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Return the number of sets of kept tokens per layer: the number of KV heads for HEAD, otherwise 1."""
        ...

    def token_ids(self, row: int) -> Int64[IntVector, " n"]:
        """Return the token ids of one row of the segment, without padding."""
        ...
