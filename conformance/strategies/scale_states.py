"""Decode states of hundreds of trunks, from a seed."""

import numpy as np

from conformance.strategies.decoding import frozen_state
from conformance.strategies.scale_numbers import Numbers
from conformance.strategies.scale_tables import network
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks
from spec.parameters import CrystalCacheParameters

__all__ = ["FAR_IDS", "state_at"]

# Ids that a narrower type takes for one another.
FAR_IDS = np.array([1, 65_537, 2**31 + 1, 2**32 + 1, 2**53, 2**53 + 1])


def state_at(seen: int, m: int, largest: int, tail: int, budget: int, p: CrystalCacheParameters) -> DecodeState:
    """m trunks of 1 to `largest` live tokens and a tail, the last of `seen`; some keys are zero."""
    numbers = Numbers(m + tail)
    sizes = numbers.integers(1, largest + 1, m)
    n = int(sizes.sum())
    gaps = 1 + numbers.integers(0, 3, n)
    positions = seen - tail - 1 - np.cumsum(gaps)[::-1]
    M, norms = 0.1 + 15 * numbers.fractions(n), numbers.fractions(n) + 0.1
    norms[numbers.integers(0, 50, n) == 0] = np.inf
    ids = np.concatenate([np.arange(2, 9), FAR_IDS])
    ids.sort()
    counts = 1 + numbers.integers(0, min(70_000, (seen - tail) // (2 * len(ids))), len(ids))
    counts[0] += seen - tail - counts.sum()
    waiting = np.concatenate([FAR_IDS, 3 + np.arange(tail) % 29])[:tail]
    table = LiveTrunks(
        positions, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), M, norms, 0.1 + 15 * numbers.fractions(m)
    )
    return frozen_state(DecodeState(
        Budget(count=budget), seen, 0, table, numbers.fractions(m), network(m, 3, m), ids, counts, 0.5, 0.25,
        tuple(waiting.tolist()), tuple((0.1 + numbers.fractions(tail)).tolist()),
    ))
