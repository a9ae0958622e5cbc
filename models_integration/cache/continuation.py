"""What a policy decides about the rows of a cache, and what the compacted cache goes on from."""

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
    """What a policy keeps beside a cache between two decisions, of all rows; it never changes, but gives another."""

    def select(self, rows: Tensor) -> "Continuation":
        """The same for other rows of the batch, by index."""
        ...

    def crop(self, tokens: int) -> "Continuation":
        """The same without the last tokens; Nothing, where they cannot be taken back."""
        ...


@dataclass(frozen=True)
class Nothing:
    """Nothing is kept: the next segment is decided over all that is stored by then."""

    def select(self, rows: Tensor) -> "Nothing":
        """Nothing of other rows."""
        return self

    def crop(self, tokens: int) -> "Nothing":
        """Nothing of fewer tokens."""
        return self


@dataclass(frozen=True)
class Decision:
    """What a policy keeps of each prompt that it was shown, or of each row of a later segment."""

    retentions: tuple[Retention, ...]
    """One for each prompt."""
    continuation: Continuation = Nothing()
    """What a cache goes on from that is compacted to these retentions, a row for each prompt."""
    records: tuple[CrystalRetention, ...] = ()
    """The retentions with all records, of a first prompt under CrystalCache; otherwise none."""
    over_budget: int = 0
    """Tokens kept beyond the budget in all prompts, because protection alone exceeds it."""
    padding: Tensor | None = None
    """Columns left of each prompt's first token, (rows,), where a first prompt is padded."""


class ObservedRows(Protocol):
    """What a continuation's rule may ask of a segment that the model has read; rows that repeat a prompt count once."""

    @property
    def columns(self) -> int:
        """Columns of the segment, padding included."""
        ...

    @property
    def continuation(self) -> Continuation:
        """What the cache goes on from before this segment is decided."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """The rows to decide about."""
        ...

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        """A first prompt, without its padding."""
        ...

    def stored(self, row: int, granularity: Granularity) -> Observation:
        """A later segment over all that the cache stores by now, where the heads of a layer store as many tokens."""
        ...

    def kept_sets(
        self, row: int, granularity: Granularity,
    ) -> tuple[list[Int64[IntVector, " _"]], list[Observation]]:
        """A later segment by kept set: the positions that each stores; one observation of all, or one for each."""
        ...

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Kept sets of one layer: its KV heads where each has its own, otherwise 1."""
        ...

    def token_ids(self, row: int) -> Int64[IntVector, " n"]:
        """The segment's tokens of one row, without padding."""
        ...
