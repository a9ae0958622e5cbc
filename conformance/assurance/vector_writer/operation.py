"""What an operation is: its oracle, and how its values are written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.vectors.json_values import Json, Results
from spec.parameters import CrystalCacheParameters

__all__ = ["Operation", "encoded"]


@dataclass(frozen=True)
class Operation:
    """An item's id, or a stage's name: its oracle, which results are bounded, and the items that a stage covers."""

    oracle: str
    results: Callable[[Any, CrystalCacheParameters], Results]
    bounded: Sequence[str] = ()
    items: Sequence[str] = ()


def encoded(value: Json) -> Json:
    """Floats as text, in every depth."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: encoded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(inner) for inner in value]
    return value
