"""Decision of a policy about the rows of a cache, and state of the policy for later decisions."""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from models_integration.cache.renumbering import Numbering
from spec.arrays import Int64, IntVector
from spec.decode import DecodeState
from spec.policy import Running
from spec.retention import Retention

__all__ = ["Continuation", "CrystalStates", "Decision", "Pending", "ScorerRecords", "Spliced"]


@dataclass(frozen=True)
class Continuation:
    """Immutable state of a policy between two decisions, for all rows of a cache.

    This base class is the empty state. The next decision is then computed from all tokens stored by then.
    """

    def select(self, rows: Tensor) -> "Continuation":
        """Return the state for the rows of the batch with these indices."""
        return self

    def crop(self, tokens: int) -> "Continuation":
        """Return the state without the last `tokens` tokens. The result is empty if they cannot be removed."""
        return self


class Pending(Enum):
    """Mode in which the model processed the pending tokens."""

    DECODED = "decoded"
    """In decode steps. D decays after each step."""
    GENERATED = "generated"
    """In steps of a session that evicts only after segments. D does not decay, but the steps are counted."""
    READ = "read"
    """Inside `reading()`. D does not decay, and the tokens are not counted as steps."""


@dataclass(frozen=True)
class Spliced:
    """An archived chunk that was spliced into a session."""

    after: int
    """Number of pending tokens before the chunk."""
    token_ids: Int64[IntVector, " n"]
    kept: Int64[IntVector, " k"]
    """Indices of the chunk's stored tokens inside the chunk, ascending."""


@dataclass(frozen=True)
class CrystalStates(Continuation):
    """States of all rows of a batch, and tokens that are not yet part of the states.

    Attributes:
        rows: one state per row. Empty before the first segment if a session begins with a chunk.
        columns: number of columns that the cache had seen when the states were computed, including padding.
        pending: ids (rows, n) of the later tokens, in order. These tokens join the tails when a state is needed.
        pending_tokens: number of pending columns, without chunks.
        kind: how the model processed the pending tokens.
        spliced: chunks between the pending tokens, in order. All rows have the same chunks.
    """

    rows: tuple[DecodeState, ...] = ()
    columns: int = 0
    pending: tuple[Tensor, ...] = ()
    pending_tokens: int = 0
    kind: Pending = Pending.GENERATED
    spliced: tuple[Spliced, ...] = ()

    @property
    def seen(self) -> int:
        """Number of columns in the states, including pending tokens and chunks."""
        return self.columns + self.pending_tokens + sum(len(chunk.token_ids) for chunk in self.spliced)

    def covers(self, columns: int) -> bool:
        """Return True if the states include all `columns` columns that a cache has seen."""
        return bool(self.rows or self.spliced) and self.seen == columns

    def read(self, ids: Tensor, kind: Pending) -> "CrystalStates":
        """Return the states with these tokens (rows, n) pending until the next decision about eviction."""
        pending, tokens = (*self.pending, ids.detach().clone()), self.pending_tokens + ids.shape[1]
        return CrystalStates(self.rows, self.columns, pending, tokens, kind, self.spliced)

    def splice(self, token_ids: Int64[IntVector, " n"], kept: Int64[IntVector, " k"]) -> "CrystalStates":
        """Return the states with a chunk spliced in after all tokens."""
        return replace(self, spliced=(*self.spliced, Spliced(self.pending_tokens, token_ids, kept)))

    def select(self, rows: Tensor) -> "CrystalStates":
        """Return the states of the rows of the batch with these indices."""
        states = tuple(self.rows[row] for row in rows.tolist()) if self.rows else ()
        return replace(self, rows=states, pending=tuple(ids[rows.to(ids.device)] for ids in self._joined()))

    def crop(self, tokens: int) -> Continuation:
        """Remove the last tokens. The result is empty if a state includes a removed token, or if a chunk follows it."""
        left = self.pending_tokens - tokens
        if left < max((chunk.after for chunk in self.spliced), default=0):
            return Continuation()
        pending = tuple(ids[:, :left] for ids in self._joined()) if left else ()
        return replace(self, pending=pending, pending_tokens=left)

    def ids(self) -> list[list[int]]:
        """Return the pending token ids of each row."""
        return [row for ids in self._joined() for row in ids.tolist()] or [[] for _ in self.rows]

    def _joined(self) -> tuple[Tensor, ...]:
        return (torch.cat(self.pending, dim=1),) if self.pending else ()


@dataclass(frozen=True)
class ScorerRecords(Continuation):
    """Records of a policy's scorer for all rows of a batch, and the name of the policy."""

    policy: str
    rows: tuple[Running, ...]

    def select(self, rows: Tensor) -> "ScorerRecords":
        """Return the records of the rows of the batch with these indices."""
        return ScorerRecords(self.policy, tuple(self.rows[row] for row in rows.tolist()))

    def crop(self, tokens: int) -> Continuation:
        """Return the empty state, because the attention of removed tokens cannot be subtracted from sums."""
        return Continuation() if tokens else self


@dataclass(frozen=True)
class Decision:
    """Decision of a policy: the kept tokens of each prompt, or of each row of a later segment."""

    retentions: tuple[Retention, ...]
    """Kept tokens, one entry for each prompt. Those of CrystalCache have the records of its stages."""
    continuation: Continuation = Continuation()
    """State of the policy for the cache after the compaction, with a row for each prompt."""
    over_budget: int = 0
    """Number of kept tokens of each set, minus the budget that the user gave (see `Session.over_budget`)."""
    padding: Tensor | None = None
    """Number of padding columns on the left of each prompt, (rows,), if a first prompt is padded."""
    on_device: bool = False
    """True if the kept tokens of a first prompt were selected on the device of the layers."""
    numbering: Numbering | None = None
    """Numbering of the cache after the compaction. None: the cache does not change its rule of positions."""
