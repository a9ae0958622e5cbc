"""An operation: its oracle, the reference's function, and how values are written in JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from conformance.vectors.codec import call, results
from conformance.vectors.files import Json, Results
from spec.parameters import CrystalCacheParameters


@dataclass(frozen=True)
class Operation:
    """An operation, under the id of an item or the name of a stage. `conformance.checks.bounds` has its bound.

    Attributes:
        oracle: The names of the functions that confirm it.
        results: What they give for inputs and parameters.
        items: The items that a stage covers.
        reference: The name in the package `reference` of the function that is called with the inputs by name; empty of
            a stage, and of an item that has an adapter in `item_vectors`.
        gives: The names of what this function returns; none of a record.
    """

    oracle: str
    results: Callable[[Any, CrystalCacheParameters], Results]
    items: Sequence[str] = ()
    reference: str = ""
    gives: Sequence[str] = ()


def direct(oracle: str, gives: str, reference: str = "", items: Sequence[str] = ()) -> Operation:
    """An operation whose oracle is called with the inputs by name, too; names of results have spaces between."""
    def run(i: Json, p: CrystalCacheParameters) -> Results:
        found = call(resolve_name(oracle), i, p)
        return found if isinstance(found, Mapping) else results(found, gives.split())

    return Operation(oracle, run, items, reference, gives.split())


def encoded(value: Json) -> Json:
    """Floats as text, in every depth."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: encoded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(inner) for inner in value]
    return value
