"""How the values of a vector are written in JSON."""

import re
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, TypeAlias

from spec.parameters import CrystalCacheParameters, NestedKVParameters

__all__ = ["Json", "Results", "decoded", "nestedkv_parameters", "parameters_of"]

Json: TypeAlias = Any
Results: TypeAlias = Mapping[str, Json]

_FLOAT = re.compile(r"-?(0x[01]\.[0-9a-f]+p[+-]\d+|inf)|nan")


def decoded(value: Json) -> Json:
    """Floats from their text, in every depth."""
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float.fromhex(value)
    if isinstance(value, dict):
        return {name: decoded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    return value


def parameters_of(given: Mapping[str, Json]) -> CrystalCacheParameters:
    """The paper's parameters, and what differs from them."""
    return CrystalCacheParameters(**given)


def nestedkv_parameters(i: Json) -> NestedKVParameters:
    """The same of NestedKV, from a vector's inputs; shares are text."""
    given = {field.name: i[field.name] for field in fields(NestedKVParameters) if field.name in i}
    for name in given.keys() & {"p", "alpha_s"}:
        given[name] = Fraction(given[name])
    return NestedKVParameters(**given)
