"""The controls: kept sets that are right or wrong by construction. A comparison that measures nothing fails them."""

from dataclasses import dataclass

import numpy as np

from models_integration.studies.results import Row
from reference.policies.budgets import everything
from reference.policies.protections import SinkAndRecent
from reference.policies.recency import recency
from spec.arrays import BoolVector, IntVector
from spec.policy import Policy, Scores, Selection

__all__ = ["CONTROL_BOUNDS", "only_needle", "verdict", "without_needle"]

CONTROL_BOUNDS: dict[str, tuple[str, float]] = {
    "without needle": ("<=", 0.05),
    "only needle": (">=", 0.9),
    "window holds needle": (">=", 0.9),
    "window misses needle": ("<=", 0.1),
}
"""The share of right answers that each control must show."""


def verdict(row: Row) -> str:
    """What a control must show and whether it does, as "<= 0.05; holds"."""
    relation, bound = CONTROL_BOUNDS[row["policy"]]
    holds = row["accuracy"] <= bound if relation == "<=" else row["accuracy"] >= bound
    return f"{relation} {bound}; {'holds' if holds else 'FAILS'}"


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
