"""What a policy that decides while tokens are decoded keeps beside a cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec.policy import Running

__all__ = ["Decoding"]


@dataclass(frozen=True)
class Decoding:
    """The records of all rows of a batch, and the name of the policy whose records they are."""

    policy: str
    rows: tuple[Running, ...]

    def select(self, indices: Tensor) -> "Decoding":
        """The same for other rows of the batch, by index."""
        return Decoding(self.policy, tuple(self.rows[row] for row in indices.tolist()))

    def repeat(self, repeats: int) -> "Decoding":
        """Every row `repeats` times, one after the other."""
        return self.select(torch.arange(len(self.rows)).repeat_interleave(repeats))
