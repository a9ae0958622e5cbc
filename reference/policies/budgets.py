"""Budgets: how a total is shared over groups."""

import numpy as np

from spec.arrays import Int64, IntVector
from spec.policy import Scores

__all__ = ["even", "everything"]


def even(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """The same share for every group; what does not divide goes to the lower groups, one token each."""
    groups = len(scores.values)
    share, rest = divmod(total, groups)
    return np.full(groups, share, dtype=np.int64) + (np.arange(groups) < rest)


def everything(total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
    """All tokens for every group, whatever the total."""
    return np.full(len(scores.values), scores.offsets[-1], dtype=np.int64)
