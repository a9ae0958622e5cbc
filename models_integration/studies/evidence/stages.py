"""One method taken apart: at which of its stages evidence is lost."""

from collections.abc import Sequence

import numpy as np

from models_integration.studies.evidence.claims import Samples
from models_integration.studies.evidence.rules import Stage
from spec.arrays import Int64, IntVector

__all__ = ["lost_at"]

_HALF = 0.5


def lost_at(samples: Samples, stages: Sequence[Stage], budget: str) -> Int64[IntVector, " n"]:
    """For each sample with evidence the stage that loses it: from there on less than half of its tokens is kept.

    The number of stages stands for none: the last one keeps it.
    """
    some = samples.with_evidence()
    tokens = np.array([row["evidence_tokens"] for row in some.rows])
    lost = np.zeros(len(some.rows), dtype=np.int64)
    for at, stage in enumerate(stages, 1):
        lost[some.kept((stage.policy, budget)) >= _HALF * tokens] = at
    return lost
