"""Controls: kept sets that are right or wrong by construction, so that a harness that measures nothing is found out."""

from dataclasses import dataclass

import numpy as np

from reference.policies.budgets import everything
from reference.policies.protections import SinkAndRecent
from reference.policies.recency import recency
from spec.arrays import BoolVector, IntVector
from spec.policy import Policy, Scores, Selection

__all__ = ["only_needle", "without_needle"]


@dataclass(frozen=True)
class _KeepAll:
    """Keeps every token but those of one span."""

    start: int
    stop: int

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        position = np.arange(scores.offsets[-1])
        return _selected((position < self.start) | (position >= self.stop))


@dataclass(frozen=True)
class _KeepProtected:
    """Keeps one span and the protected tokens."""

    start: int
    stop: int

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        position = np.arange(scores.offsets[-1])
        return _selected(((position >= self.start) & (position < self.stop)) | protected)


def _selected(kept: BoolVector) -> Selection:
    positions = np.flatnonzero(kept)
    return Selection(positions, np.array([0, len(positions)], dtype=np.int64))


def without_needle(start: int, stop: int) -> Policy:
    """The full cache, less the tokens of the fact: what is then answered was not read from them."""
    return Policy("without the needle", recency, everything, _KeepAll(start, stop), SinkAndRecent(0, 0))


def only_needle(start: int, stop: int, N_sink: int = 4, W_recent: int = 128) -> Policy:
    """The fact, the sinks and the recent window, and nothing else: enough, if the model reads the fact at all."""
    return Policy(
        "needle, sinks and window", recency, everything, _KeepProtected(start, stop), SinkAndRecent(N_sink, W_recent)
    )
