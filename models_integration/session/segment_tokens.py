"""Tokens of a segment, which the model may process in pieces."""

import torch
from torch import Tensor

from spec.arrays import IntVector

__all__ = ["SegmentTokens"]


class SegmentTokens:
    """Columns of a segment that the model has processed so far, in one or more pieces."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._is_token: list[Tensor] = []

    def add(self, input_ids: Tensor, is_token: Tensor) -> None:
        """Append columns (rows, n). `is_token` (rows, n) is False for padding."""
        self._ids.append(input_ids)
        self._is_token.append(is_token)

    def __len__(self) -> int:
        return sum(ids.shape[1] for ids in self._ids)

    @property
    def input_ids(self) -> Tensor:
        """Ids of all columns, (rows, columns)."""
        return torch.cat(self._ids, dim=1)

    @property
    def is_token(self) -> Tensor:
        """Mask of all columns, (rows, columns): True for a token, False for padding."""
        return torch.cat(self._is_token, dim=1)

    @property
    def padding(self) -> Tensor | None:
        """Number of padding columns of each row, (rows,). None if no row has padding."""
        is_token = self.is_token
        return None if bool(is_token.all()) else (~is_token).sum(dim=1)

    def token_ids(self, row: int) -> IntVector:
        """Return the token ids of one row, without padding."""
        ids: IntVector = self.input_ids[row][self.is_token[row]].numpy()
        return ids
