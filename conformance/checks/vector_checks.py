"""Whether results are the expected ones: the same bits, or inside the bounds of `conformance.tolerances`."""

import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.checks.refusals import refused, unchecked
from conformance.vectors import files
from conformance.vectors.arrays import Item, floats, integers, plain
from conformance.vectors.compact import expanded, is_compact, mismatches
from conformance.vectors.json_values import Json, decoded, nestedkv_parameters, parameters_of
from conformance.vectors.subject import attention_inputs, prompt, record
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, TrunkGraph, Trunks

__all__ = [
    "BOUNDED", "STATE_FLOATS", "Bounded", "cases", "complaints", "crystallization", "impact_radius", "problems",
    "relative", "weights", "within",
]

Bounded = Callable[[Any, Any, Any, CrystalCacheParameters, str], Iterator[str]]


def cases(operations: Container[str]) -> list[Any]:
    """Group and test of the published vectors of these operations, under the marks of their items."""
    return [
        pytest.param(group, test, id=f"{stage}-{test['tcId']}", marks=pytest.mark.spec(*test["items"]))
        for stage, group, test in files.published() if group["operation"] in operations
    ]


def problems(
    group: Json, test: Json, run: Item, bounded: Mapping[str, Bounded], precision: str,
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
    found: Mapping[str, Any], test: Json, judge: Bounded | None, p: CrystalCacheParameters, precision: str,
) -> Iterator[str]:
    """What is wrong with the results of one decoded test; a summary judges bounded results too, else `judge`."""
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
        assert judge is not None
        yield from judge(found, test["expected"], test["inputs"], p, precision)


def same(got: Any, want: Any) -> bool:
    """Equal in structure, in kind and to the bit; any NaN equals any other."""
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float) and isinstance(got, float):
        return struct.pack("d", got) == struct.pack("d", want) or (got != got and want != want)
    return type(got) is type(want) and bool(got == want)


def within(name: str, got: Any, want: Any, radius: Any) -> Iterator[str]:
    """No farther apart than the radius, element by element; NaN where NaN is wanted."""
    a, b = floats(plain(got)), floats(want)
    if a.shape != b.shape or ((np.abs(a - b) > radius) | (np.isnan(a) != np.isnan(b))).any():
        yield f"{name} is {a.tolist()}, not {b.tolist()} within {np.max(radius)}"


def weights(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    if not tolerances.close("CC-TRUNK-WEIGHT", found["weights"], want["weights"]):
        yield f"weights are {plain(found['weights'])}, not {want['weights']}"


def graph(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Weights by their bound, degrees from the weights that were found, D from the degrees that were found."""
    yield from weights(found, want, i, p, precision)
    offsets = integers(i["offsets"])
    yield from stage_checks.graph(TrunkGraph(**found), record(i), Trunks(offsets, np.ones(len(offsets) - 1)), p)


def score(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """D is exact where it wins; what impact gives is bounded."""
    radius = p.alpha * impact_radius(i["impact"], i["protected"], p)
    by_D = floats(want["score"]) == floats(i["D"])
    yield from within("score", found["score"], want["score"], np.where(by_D, 0, radius))


def impact_radius(M_bar: Any, protected: Any, p: CrystalCacheParameters) -> float:
    alive = [M for M, shut in zip(M_bar, protected, strict=True) if not shut]
    return tolerances.normalised_radius(alive, p.epsilon)


def coattention(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    yield from stage_checks.coattention(CoAttention(**found), attention_inputs(i, p), precision)


def prefill(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Every record of the run, each judged from the one before it."""
    yield from stage_checks.retention(found["record"], prompt(i, p), precision)


def key_norms(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    got, expected = floats(plain(found["inverse_norms"])), floats(want["inverse_norms"])
    finite = np.isfinite(expected)
    if np.isfinite(got).tolist() != finite.tolist():
        yield f"inverse_norms is {got.tolist()}, not {expected.tolist()}"
    else:
        radius = tolerances.key_norm_error(len(i["k"]), len(i["k"][0][0])) * expected[finite]
        yield from within("inverse_norms", got[finite], expected[finite].tolist(), radius)


def decay(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    yield from within("D", found["D"], want["D"], tolerances.decay_radius(floats(i["D"])))


def crystallization(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    radius = tolerances.crystallization_radius(floats(i["degree"]), p.s, p.epsilon)
    yield from within("D", found["D"], want["D"], radius)


def anomaly_score(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    for h, head in enumerate(i["k"]):
        radius = tolerances.nestedkv_radius(head, nestedkv_parameters(i), precision)
        yield from within(f"score of head {h}", found["score"][h], want["score"][h], radius)


def relative(item: str, names: Sequence[str]) -> Bounded:
    """Each of these results within the item's bound of what is wanted."""
    def judge(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        for name in names:
            got, expected = (np.atleast_1d(floats(plain(side[name]))) for side in (found, want))
            if not tolerances.close(item, got, expected):
                yield f"{name} is {plain(found[name])}, not {want[name]}"

    return judge


STATE_FLOATS = ("impact", "trunk_impact", "D", "weights", "mu", "sigma")

BOUNDED: Mapping[str, Bounded] = {
    "impact": relative("CC-IMPACT", ["M"]), "graph": graph, "score": score, "coattention": coattention,
    "prefill": prefill, "anomaly_score": anomaly_score, "inverse_key_norms": key_norms, "decay": decay,
    "segment_graph": relative("CC-TRUNK-WEIGHT", ["weights"]),
    "segment_crystallization": crystallization, "decode_step": relative("CC-STEP", STATE_FLOATS),
    "extend": relative("CC-SEGMENT", [*STATE_FLOATS, "inverse_norms"]),
}
