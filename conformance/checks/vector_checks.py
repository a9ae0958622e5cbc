"""Whether results are the expected ones: the same bits, or inside the bounds of `conformance.tolerances`."""

import struct
from collections.abc import Container, Iterator, Mapping
from typing import Any

import pytest

from conformance.checks.bounds import BOUNDED, Bound
from conformance.checks.refusals import refused, unchecked
from conformance.vectors import files
from conformance.vectors.codec import Item, plain
from conformance.vectors.compact import expanded, is_compact, mismatches
from conformance.vectors.files import Json, decoded, parameters_of
from spec.parameters import CrystalCacheParameters

__all__ = ["BOUNDED", "cases", "complaints", "problems", "same"]


def cases(operations: Container[str]) -> list[Any]:
    """Group and test of the published vectors of these operations, under the marks of their items, the whole first."""
    return [
        pytest.param(group, test, id=f"{stage}-{test['tcId']}", marks=pytest.mark.spec(*test["items"][::-1]))
        for stage, group, test in files.published() if group["operation"] in operations
    ]


def problems(
    group: Json, test: Json, run: Item, bounded: Mapping[str, Bound], precision: str,
) -> list[str]:
    """What is wrong with what an operation makes of a published test, or an error where it does not refuse one."""
    p, inputs = parameters_of(decoded(group["parameters"])), expanded(decoded(test["inputs"]))
    if test["result"] == "invalid":
        with unchecked(), refused(test["expected"]["argument"]):
            run(inputs, p)
        return []
    given = {**decoded(test), "inputs": inputs}
    return list(complaints(run(inputs, p), given, bounded.get(group["operation"]), p, precision))


def complaints(
    found: Mapping[str, Any], test: Json, bound: Bound | None, p: CrystalCacheParameters, precision: str,
) -> Iterator[str]:
    """What is wrong with the results of one decoded test; a summary judges bounded results too, else `bound`."""
    short = {name: want for name, want in test["expected"].items() if is_compact(want)}
    bounded = [name for name in test.get("bounded", []) if name not in short]
    wrong = [
        problem for name, want in short.items() for problem in mismatches(name, plain(found[name]), want)
    ]
    wrong += [
        f"{name} is {plain(found[name])}, not {want}" for name, want in test["expected"].items()
        if name not in bounded and name not in short and not same(plain(found[name]), want)
    ]
    yield from wrong
    if bounded and not wrong:
        assert bound is not None
        yield from bound.judge(found, test["expected"], test["inputs"], p, precision)


def same(got: Any, want: Any) -> bool:
    """Equal in structure, in kind and to the bit; any NaN equals any other."""
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float) and isinstance(got, float):
        return struct.pack("d", got) == struct.pack("d", want) or (got != got and want != want)
    return type(got) is type(want) and bool(got == want)
