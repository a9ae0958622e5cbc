"""Floats that narrower arithmetic, or another order of the bits, does not tell apart as float64 does; their types."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["CLOSE", "SPECIAL", "TYPES", "TYPE_PAIRS", "close", "of_type", "special"]

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


SPECIAL: Mapping[str, Sequence[float]] = {
    "no number or least": (math.nan, -math.inf), "no number": (math.nan,), "least": (-math.inf, -1.7e308, -1e30),
    "all kinds": (math.nan, -math.inf, math.inf, -1.7e308, -1.0, -0.0, 0.0, 1.7e308),
}
"""Kinds of scores that order among themselves alone: as numbers they are lost in any sum, or stand for something."""


def special(kind: str, seed: int, shape: int | tuple[int, ...]) -> Any:
    """An array of values of one of these kinds."""
    return np.random.default_rng(seed).choice(SPECIAL[kind], shape)


TYPES: Mapping[str, tuple[type, float]] = {
    "float16": (np.float16, 1.0), "large float16": (np.float16, 2.0**13), "small float16": (np.float16, 2.0**-12),
    "float32": (np.float32, 1.0), "large float32": (np.float32, 2.0**60), "small float32": (np.float32, 2.0**-60),
    "float64": (np.float64, 1.0), "longdouble": (np.longdouble, 1.0),
}
"""Types of arrays, and what a number of the size of 1 is multiplied by: sums and squares of large ones overflow."""

TYPE_PAIRS = [
    *[(kind, kind) for kind, (_, size) in TYPES.items() if size == 1.0], ("large float16", "small float16"),
    ("small float16", "large float16"), ("large float32", "small float32"), ("small float32", "large float32"),
    ("float16", "float32"), ("float32", "float16"), ("longdouble", "float32"),
]
"""Of queries and keys, whose products are of the size of 1."""


def of_type(kind: str, seed: int, shape: tuple[int, ...]) -> tuple[Any, float]:
    """Positive eighths up to 2, times what the type's size is, which every type has exactly; and that size."""
    dtype, size = TYPES[kind]
    return (size * np.random.default_rng(seed).integers(1, 17, shape) / 8).astype(dtype), size
