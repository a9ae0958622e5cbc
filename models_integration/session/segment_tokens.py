"""The tokens of a segment, which may be read in pieces."""

import torch
from torch import Tensor

from spec.arrays import IntVector

__all__ = ["SegmentTokens"]


class SegmentTokens:
    """The columns of a segment that the model has read so far, piece by piece."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._is_token: list[Tensor] = []

    def add(self, input_ids: Tensor, is_token: Tensor) -> None:
        """These columns (rows, n) come next, and where a token stands in them, (rows, n)."""
        self._ids.append(input_ids)
        self._is_token.append(is_token)

    def __len__(self) -> int:
        return sum(ids.shape[1] for ids in self._ids)

    @property
    def input_ids(self) -> Tensor:
        """What they hold, (rows, columns)."""
        return torch.cat(self._ids, dim=1)

    @property
    def is_token(self) -> Tensor:
        """Which of them hold a token, (rows, columns)."""
        return torch.cat(self._is_token, dim=1)

    @property
    def padding(self) -> Tensor | None:
        """Columns without a token, (rows,); None where there are none."""
        is_token = self.is_token
        return None if bool(is_token.all()) else (~is_token).sum(dim=1)

    def token_ids(self, row: int) -> IntVector:
        """The tokens of one row, without padding."""
        ids: IntVector = self.input_ids[row][self.is_token[row]].numpy()
        return ids
