"""Token ids, and which of them end a sentence."""

import numpy as np
from hypothesis import strategies as st

from conformance.strategies.sizes import ALPHABET
from spec.arrays import BoolVector, IntVector

__all__ = ["end_masks", "sentence_ends", "token_ids"]


def token_ids(n: int) -> st.SearchStrategy[IntVector]:
    """n ids out of few, so that most of them repeat; now and then an id is far away."""
    ids = st.lists(st.one_of(st.integers(0, ALPHABET - 1), st.just(128_000)), min_size=n, max_size=n)
    return ids.map(lambda found: np.array(found, dtype=np.int64))


def sentence_ends() -> st.SearchStrategy[frozenset[int]]:
    """Ids of the alphabet, and an id that never occurs."""
    return st.frozensets(st.integers(0, ALPHABET), min_size=1, max_size=3)


def end_masks(n: int) -> st.SearchStrategy[BoolVector]:
    """Any tokens end a sentence: none, all, runs of ends, the last one or not."""
    masks = st.one_of(
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(st.sampled_from([False, False, False, True]), min_size=n, max_size=n),
        st.just([False] * n), st.just([True] * n),
    )
    return masks.map(lambda found: np.array(found, dtype=np.bool_))
