"""Backends with one mistake each: `python -m conformance.engine.serve tests.engine.planted:NAME`."""

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np

from reference.backend import BACKEND as RIGHT
from spec.policy import Selection
from tests.conformance.float32 import BACKEND as FLOAT32

__all__ = ["BUDGET", "CRASHING", "FLOAT32", "MANY_HEADS", "RIGHT", "TIES"]

EVERY, HEADS = 100, 16


class Over:
    """Stages of the reference, of which a subclass overrides some."""

    def __init__(self, stages: Any) -> None:
        self._right = stages

    def __getattr__(self, stage: str) -> Any:
        return getattr(self._right, stage)


class _HigherIndex(Over):
    """Give equal gains to the higher position, by reading the tokens backwards."""

    def diverse(self, s: Any, V: Any, retained: Any, k: int, lam: float, /) -> Any:
        kept = self._right.diverse(s[::-1], V[::-1], retained[::-1], k, lam)
        return (len(s) - 1 - kept)[::-1]


class _OneMore(Over):
    """A budget of one token more."""

    def dissolve(self, score: Any, trunks: Any, impact: Any, D: Any, protected: Any, budget: int, p: Any, /) -> Any:
        return self._right.dissolve(score, trunks, impact, D, protected, budget + 1, p)


class _Crashing(Over):
    """The process ends at every hundredth call."""

    calls = itertools.count(1)

    def best_tokens(self, values: Any, shares: Any, pinned: Any, /) -> Selection:
        if next(self.calls) == EVERY:
            os.write(2, b"out of scratch memory")
            os._exit(3)
        actual: Selection = self._right.best_tokens(values, shares, pinned)
        return actual


class _ManyHeads(Over):
    """Ignore all heads after the sixteenth."""

    def received_attention(self, q: Any, k: Any, scaling: float, softcap: float | None, sinks: Any = None, /) -> Any:
        actual = self._right.received_attention(q, k, scaling, softcap, sinks)
        return np.where(np.arange(len(k))[:, None] < HEADS, actual, 0.0)


TIES = replace(RIGHT, name="ties", diversity=_HigherIndex(RIGHT.diversity))
BUDGET = replace(RIGHT, name="budget", crystal=_OneMore(RIGHT.crystal))
CRASHING = replace(RIGHT, name="crashing", policies=_Crashing(RIGHT.policies))
MANY_HEADS = replace(RIGHT, name="many heads", policies=_ManyHeads(RIGHT.policies))
