"""JSON values as arrays and back, and the types of what is run on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.vectors.json_values import Json
from spec.backend import Backend
from spec.parameters import CrystalCacheParameters

__all__ = ["Item", "Stage", "flags", "floats", "integers", "named", "plain"]

Item = Callable[[Any, CrystalCacheParameters], Mapping[str, object]]
Stage = Callable[[Backend, Any, CrystalCacheParameters], Mapping[str, object]]


def floats(values: Json) -> Any:
    """A float64 array in which null is NaN."""
    return np.array(values, dtype=np.float64)


def integers(values: Json) -> Any:
    return np.array(values, dtype=np.int64)


def flags(values: Json) -> Any:
    return np.array(values, dtype=np.bool_)


def named(names: Sequence[str], values: Sequence[object]) -> Mapping[str, object]:
    return dict(zip(names, values, strict=True))


def plain(value: Any) -> Any:
    """Arrays and NumPy numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(x) for x in value] if isinstance(value, list | tuple) else value
