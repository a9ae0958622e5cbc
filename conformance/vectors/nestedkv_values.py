"""How vectors write NestedKV's parameters, and which result of each item has a bound."""

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction

from conformance.vectors.json_values import Json
from spec.parameters import NestedKVParameters

__all__ = ["BOUNDED_RESULTS", "parameters_in"]

BOUNDED_RESULTS: Mapping[str, str] = {
    "NK-UNIT-KEYS": "unit", "NK-STABLE": "mu", "NK-EPISODIC": "mu", "NK-CURRENT": "mu", "NK-ANOMALY": "a",
    "NK-MIN-MAX": "a", "NK-GAP": "delta", "NK-BLEND": "blend", "NK-SURPRISE": "s", "NK-ROUTE": "score",
    "NK-SCORE": "score",
}


def parameters_in(i: Json) -> NestedKVParameters:
    """The paper's parameters, and what the inputs say of them; shares are text."""
    given = {field.name: i[field.name] for field in fields(NestedKVParameters) if field.name in i}
    for name in given.keys() & {"p", "alpha_s"}:
        given[name] = Fraction(given[name])
    return NestedKVParameters(**given)
