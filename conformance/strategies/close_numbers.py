"""Floats that narrower arithmetic, or another order of the bits, does not tell apart as float64 does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["CLOSE", "close"]

LEAST = 2.0**-1074

CLOSE: Mapping[str, Sequence[float]] = {
    "zeros": (-0.0, 0.0), "subnormal": (-0.0, 0.0, LEAST, 2 * LEAST, 2.0**-1022 - LEAST, 2.0**-1022),
    "ulp": (1 - 2.0**-53, 1.0, 1 + 2.0**-52), "trillionth": (1.0, 1 + 1e-12, 1 + 2e-12),
    "huge": (1e300, float(np.nextafter(1e300, 2e300)), 1.7e308), "tiny": (1e-50, 1.1e-50, 1e-300, 1.1e-300, 0.0),
    "signs": (-1 - 2.0**-52, -1.0, -LEAST, -0.0, 0.0, LEAST),
}
"""Kinds, each with its few values: all are met, and most of them tie."""


def close(kind: str, seed: int, shape: int | tuple[int, ...]) -> Any:
    """An array of values of one kind."""
    return np.random.default_rng(seed).choice(CLOSE[kind], shape)
