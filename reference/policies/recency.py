"""The scorer that looks at nothing: later tokens first."""

from dataclasses import dataclass

import numpy as np

from spec.arrays import BoolVector
from spec.policy import Needs, Observation, Scores

__all__ = ["recency"]


@dataclass(frozen=True)
class _Recency:
    needs: Needs = Needs()

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        positions = np.arange(observation.seen, dtype=np.float64)
        return Scores(np.tile(positions, (observation.groups, 1)), np.arange(observation.seen + 1))


recency = _Recency()
