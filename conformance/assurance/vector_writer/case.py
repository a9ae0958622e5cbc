"""What a vector is made of, before it is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.vectors.json_values import Json, Results
from spec.parameters import CrystalCacheParameters

__all__ = ["Case", "Group", "Operation", "encoded"]


@dataclass(frozen=True)
class Case:
    """One vector without its expected values. `tcId` is its name for ever.

    `refused` names the argument that a SpecError must name; `exact` the results that are exact on this input although
    the operation is bounded, because all intermediate values are dyadic. `bits` is the grid of the digests of long
    bounded results.
    """

    tcId: int  # noqa: N815
    comment: str
    flags: Sequence[str]
    inputs: Mapping[str, Json]
    exact: Sequence[str] = ()
    refused: str | None = None
    items: Sequence[str] = ()
    bits: int = 20


@dataclass(frozen=True)
class Group:
    """Cases of one operation, an item's id or a stage's name, at the same parameters (those that differ from PAPER)."""

    operation: str
    cases: Sequence[Case]
    parameters: Mapping[str, Json] = field(default_factory=dict)


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
