"""S2, Step 1: sentences (Section 3.3)."""

import numpy as np

from spec.arrays import Bool, BoolVector, Int64, IntVector

__all__ = ["sentence_offsets"]


def sentence_offsets(ends: Bool[BoolVector, " n"]) -> Int64[IntVector, " M_and_one"]:
    """Return the offsets of the sentences: sentence i contains the tokens offsets[i] to offsets[i + 1] - 1.

    Implements: CC-SENTENCES

    Source: Section 3.3, Step 1. A token that ends a sentence is the last token of this sentence. Tokens after the last
    sentence end form one more sentence.
    """
    stops = np.flatnonzero(ends) + 1
    n = len(ends)
    tail = [n] if n and not ends[-1] else []
    return np.concatenate([[0], stops, tail]).astype(np.int64)
