"""What a cache's rows know of themselves: a DecodeState each, and the tokens that came since."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec.arrays import Int64, IntVector
from spec.decode import DecodeState

__all__ = ["RowStates", "Spliced"]


@dataclass(frozen=True)
class Spliced:
    """A chunk that was put behind what a session had read."""

    after: int
    """How many of the tokens that wait stand before it."""
    token_ids: Int64[IntVector, " n"]
    kept: Int64[IntVector, " k"]
    """Those of its tokens that are stored, by their place in it, ascending."""


@dataclass(frozen=True)
class RowStates:
    """The states of all rows of a batch.

    Attributes:
        rows: one state per row; none where no policy has made any.
        columns: columns that the cache had seen by then, padding included.
        waiting: ids (rows, n) of the tokens read since, in order: they join the tails when a state is asked for.
        waiting_tokens: columns that wait, chunks aside.
        steps: whether each of them is a step of decode, after which D decays.
        spliced: chunks put between them, in order, the same in every row. They need no state before them: a session
            may begin with a chunk.
    """

    rows: tuple[DecodeState, ...] = ()
    columns: int = 0
    waiting: tuple[Tensor, ...] = ()
    waiting_tokens: int = 0
    steps: bool = False
    spliced: tuple[Spliced, ...] = ()

    @property
    def seen(self) -> int:
        """Columns that the states know of, once nothing waits any more."""
        return self.columns + self.waiting_tokens + sum(len(chunk.token_ids) for chunk in self.spliced)

    def know(self, columns: int) -> bool:
        """Whether these states are about all `columns` that a cache has seen."""
        return bool(self.rows or self.spliced) and self.seen == columns

    def wait(self, ids: Tensor, *, steps: bool) -> "RowStates":
        """These tokens (rows, n) have been read, and nobody has looked at them yet."""
        if not self.rows and not self.spliced:
            return self
        waiting, tokens = (*self.waiting, ids), self.waiting_tokens + ids.shape[1]
        return RowStates(self.rows, self.columns, waiting, tokens, steps, self.spliced)

    def splice(self, token_ids: Int64[IntVector, " n"], kept: Int64[IntVector, " k"]) -> "RowStates":
        """A chunk has been put behind all that."""
        return replace(self, spliced=(*self.spliced, Spliced(self.waiting_tokens, token_ids, kept)))

    def select(self, indices: Tensor) -> "RowStates":
        """The same for other rows of the batch, by index."""
        rows = tuple(self.rows[row] for row in indices.tolist()) if self.rows else ()
        return replace(self, rows=rows, waiting=tuple(ids[indices.to(ids.device)] for ids in self._joined()))

    def crop(self, tokens: int) -> "RowStates":
        """Without the last tokens: nothing is known where a state has gone beyond them already, or a chunk."""
        left = self.waiting_tokens - tokens
        if left < max((chunk.after for chunk in self.spliced), default=0):
            return RowStates()
        waiting = tuple(ids[:, :left] for ids in self._joined()) if left else ()
        return replace(self, waiting=waiting, waiting_tokens=left)

    def ids(self) -> list[list[int]]:
        """What waits, row by row."""
        return [row for ids in self._joined() for row in ids.tolist()] or [[] for _ in self.rows]

    def _joined(self) -> tuple[Tensor, ...]:
        return (torch.cat(self.waiting, dim=1),) if self.waiting else ()
