"""S2, Step 1: sentences (Section 3.3)."""

import numpy as np

from spec.arrays import Bool, BoolVector, Int64, IntVector

__all__ = ["sentence_offsets"]


def sentence_offsets(ends: Bool[BoolVector, " n"]) -> Int64[IntVector, " M_and_one"]:
    """Sentence i holds tokens offsets[i] to offsets[i + 1]; a token that ends a sentence is its last.

    Implements: CC-SENTENCES

    Source: Section 3.3, Step 1. Tokens after the last end are a sentence too.
    """
    stops = np.flatnonzero(ends) + 1
    n = len(ends)
    tail = [n] if n and not ends[-1] else []
    return np.concatenate([[0], stops, tail]).astype(np.int64)
