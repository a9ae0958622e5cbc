"""What the writer says of compact values, beside what a reader must know."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.vectors.compact import digest, expanded, is_compact, words
from conformance.vectors.json_values import Json

__all__ = ["made", "unsure"]


def made(inputs: Mapping[str, Json]) -> dict[str, Json]:
    """Shape and digest of each compact input but text, for a reader to compare."""
    arrays = {name: np.array(x) for name, x in expanded(inputs).items() if is_compact(inputs[name])}
    return {
        name: [list(x.shape), digest(words(x.ravel(), None))] for name, x in arrays.items() if x.dtype.kind != "U"
    }


def unsure(values: Any, bits: int) -> int:
    """How many values lie so near a half step of the grid that a bound may reach across: none may be summarised."""
    x = np.array(values, dtype=np.float64).ravel()
    x = x[~np.isnan(x)]
    steps = x * 2.0**bits
    off = np.abs(steps - np.floor(steps) - 0.5) * 2.0**-bits
    return int((off <= 2.0 ** (-2 * bits) * np.maximum(1.0, np.abs(x))).sum())
