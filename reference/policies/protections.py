"""Protection: which tokens are never evicted."""

from dataclasses import dataclass

import numpy as np

from spec.arrays import Bool, BoolVector

__all__ = ["SinkAndRecent"]


@dataclass(frozen=True)
class SinkAndRecent:
    """The first `sink` and the last `recent` of the tokens seen."""

    sink: int
    recent: int

    def __call__(self, seen: int, /) -> Bool[BoolVector, " n"]:
        position = np.arange(seen)
        protected: BoolVector = (position < self.sink) | (position >= seen - self.recent)
        return protected
