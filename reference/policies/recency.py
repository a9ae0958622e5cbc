"""The scorer that looks at nothing: later tokens first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spec.arrays import BoolVector
from spec.policy import Needs, Observation, Scores

__all__ = ["recency"]


@dataclass(frozen=True)
class _Recency:
    needs: Needs = Needs()
    separable: bool = False
    layerwise: ClassVar[bool] = True

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        cached = np.arange(observation.seen) if observation.positions is None else observation.positions
        return Scores(np.tile(cached.astype(np.float64), (observation.groups, 1)), np.arange(len(cached) + 1))


recency = _Recency()
