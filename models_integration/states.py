"""What a cache's rows know of themselves: a DecodeState each, and the tokens that came since."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec.decode import DecodeState

__all__ = ["RowStates"]


@dataclass(frozen=True)
class RowStates:
    """The states of all rows of a batch.

    Attributes:
        rows: one state per row; none where no policy has made any.
        columns: columns that the cache had seen by then, padding included.
        waiting: ids (rows, n) of the tokens read since, in order: they join the tails when a state is asked for.
        waiting_tokens: columns that wait.
        steps: whether each of them is a step of decode, after which D decays.
    """

    rows: tuple[DecodeState, ...] = ()
    columns: int = 0
    waiting: tuple[Tensor, ...] = ()
    waiting_tokens: int = 0
    steps: bool = False

    def know(self, columns: int) -> bool:
        """Whether these states are about all `columns` that a cache has seen."""
        return bool(self.rows) and self.columns + self.waiting_tokens == columns

    def wait(self, ids: Tensor, *, steps: bool) -> "RowStates":
        """These tokens (rows, n) have been read, and nobody has looked at them yet."""
        if not self.rows:
            return self
        return RowStates(self.rows, self.columns, (*self.waiting, ids), self.waiting_tokens + ids.shape[1], steps)

    def select(self, indices: Tensor) -> "RowStates":
        """The same for other rows of the batch, by index."""
        if not self.rows:
            return self
        waiting = tuple(ids[indices.to(ids.device)] for ids in self._joined())
        return replace(self, rows=tuple(self.rows[row] for row in indices.tolist()), waiting=waiting)

    def crop(self, tokens: int) -> "RowStates":
        """Without the last tokens: nothing is known where a state has gone beyond them already."""
        left = self.waiting_tokens - tokens
        if left < 0:
            return RowStates()
        waiting = tuple(ids[:, :left] for ids in self._joined()) if left else ()
        return replace(self, waiting=waiting, waiting_tokens=left)

    def ids(self) -> list[list[int]]:
        """What waits, row by row."""
        return [row for ids in self._joined() for row in ids.tolist()] or [[] for _ in self.rows]

    def _joined(self) -> tuple[Tensor, ...]:
        return (torch.cat(self.waiting, dim=1),) if self.waiting else ()
