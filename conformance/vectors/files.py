"""Files of the published vectors, and the JSON form of their values."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from conformance.paths import SPEC
from spec.parameters import CrystalCacheParameters, NestedKVParameters

Json: TypeAlias = Any
Results: TypeAlias = Mapping[str, Json]

_FLOAT = re.compile(r"-?(0x[01]\.[0-9a-f]+p[+-]\d+|inf)|nan")


def decoded(value: Json) -> Json:
    """Convert texts of floats to floats, at every depth."""
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float.fromhex(value)
    if isinstance(value, dict):
        return {name: decoded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    return value


def parameters_of(given: Mapping[str, Json]) -> CrystalCacheParameters:
    """Return the paper's parameters, changed by the given values."""
    return CrystalCacheParameters(**given)


def nestedkv_parameters(i: Json) -> NestedKVParameters:
    """Return NestedKV's parameters, changed by a vector's inputs. Shares are written as text."""
    given = {field.name: i[field.name] for field in fields(NestedKVParameters) if field.name in i}
    for name in given.keys() & {"p", "alpha_s"}:
        given[name] = Fraction(given[name])
    return NestedKVParameters(**given)


HOME = SPEC / "vectors"


def path_of(stage: str) -> Path:
    """Return the path of the vectors of a stage."""
    return HOME / f"{stage}.json"


def stages() -> list[str]:
    """Return the names of the stages that have a file, sorted."""
    return sorted({path.stem for path in HOME.glob("*.json")} - {"schema"})


def stored(stage: str) -> Json:
    """Return the content of the published file of a stage, or None if the file does not exist."""
    path = path_of(stage)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def published() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield stage, group and test of every vector."""
    for stage in stages():
        for group in stored(stage)["testGroups"]:
            for test in group["tests"]:
                yield stage, group, test
