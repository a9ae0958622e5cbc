"""Whether results are the expected ones: the same bits, or inside the bounds of `conformance.tolerances`."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.vectors.arrays import floats, integers, plain
from conformance.vectors.compact import is_compact, mismatches
from conformance.vectors.json_values import Json
from conformance.vectors.nestedkv_values import BOUNDED_RESULTS, parameters_in
from conformance.vectors.subject import attention_inputs, prompt, record
from spec.parameters import CrystalCacheParameters
from spec.parameters.crystalcache import HeadsForm
from spec.records import CoAttention, TrunkGraph, Trunks

__all__ = ["complaints"]

Bounded = Callable[[Any, Any, Any, CrystalCacheParameters, str], Iterator[str]]


def complaints(
    found: Mapping[str, Any], test: Json, operation: str, p: CrystalCacheParameters, precision: str,
) -> Iterator[str]:
    """What is wrong with the results of one decoded test; a summary judges bounded results too."""
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
        yield from BOUNDED[operation](found, test["expected"], test["inputs"], p, precision)


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


def attention(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    error = tolerances.attention_error(floats(i["q"]), floats(i["k"]), i["scaling"], i["softcap"], "float64")
    A = floats(want["A"])
    yield from within("A", found["A"], want["A"], A * error[:, None])


def salience(heads: HeadsForm) -> Bounded:
    """Of given columns, whose heads are combined in this way."""
    def judge(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        exact = [0.0] * len(i["own"][0])
        radius = tolerances.salience_radius(i["own"], exact, p.k_heads, p.M_min, "float64", heads)
        yield from within("S", found["S"], want["S"], floats(radius))

    return judge


def row_norm(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    error = 2 * tolerances.gamma(len(i["A"]) + 1 + 8, "float64")  # either side errs; one head
    yield from within("rows", found["rows"], want["rows"], floats(want["rows"]) * error)


def weights(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    if not tolerances.close("CC-TRUNK-WEIGHT", found["weights"], want["weights"]):
        yield f"weights are {plain(found['weights'])}, not {want['weights']}"


def crystallization(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    radius = tolerances.crystallization_radius(floats(i["degree"]), p.s, p.epsilon)
    yield from within("D", found["D"], want["D"], radius)


def graph(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Weights by their bound, degrees from the weights that were found, D from the degrees that were found."""
    yield from weights(found, want, i, p, precision)
    offsets = integers(i["offsets"])
    yield from stage_checks.graph(TrunkGraph(**found), record(i), Trunks(offsets, np.ones(len(offsets) - 1)), p)


def normalised(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    yield from within("M_tilde", found["M_tilde"], want["M_tilde"], _radius(i["M_bar"], i["protected"], p))


def score(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """D is exact where it wins; what impact gives is bounded."""
    radius = p.alpha * _radius(i["impact"], i["protected"], p)
    by_D = floats(want["score"]) == floats(i["D"])
    yield from within("score", found["score"], want["score"], np.where(by_D, 0, radius))


def _radius(M_bar: Any, protected: Any, p: CrystalCacheParameters) -> float:
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


def nestedkv_item(name: str) -> Bounded:
    """An item's result, at the scale of its largest entry."""
    def judge(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        if not tolerances.scores_agree(floats(plain(found[name])).ravel(), floats(want[name]).ravel().tolist()):
            yield f"{name} is {plain(found[name])}, not {want[name]}"

    return judge


def anomaly_score(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    for h, head in enumerate(i["k"]):
        radius = tolerances.nestedkv_radius(head, parameters_in(i), precision)
        yield from within(f"score of head {h}", found["score"][h], want["score"][h], radius)


def relative(item: str, names: Sequence[str]) -> Bounded:
    """Each of these results within the item's bound of what is wanted."""
    def judge(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        for name in names:
            got, expected = (np.atleast_1d(floats(plain(side[name]))) for side in (found, want))
            if not tolerances.close(item, got, expected):
                yield f"{name} is {plain(found[name])}, not {want[name]}"

    return judge


def scored(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    for got, expected in zip(plain(found["score"]), want["score"], strict=True):
        if not tolerances.scores_agree(got, expected):
            yield f"score is {got}, not {expected}"


def turned(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    yield from within("turned", found["turned"], want["turned"], tolerances.turn_radius(floats(i["x"])))


def cosines(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    radius = tolerances.key_cosine_error(len(i["fresh"][0][0]))
    for name in ("raw", "unrotated"):
        yield from within(name, floats(plain(found[name])).ravel(), floats(want[name]).ravel().tolist(), radius)


def interval(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    terms = len(i["drawn"][0]) * len(i["differences"]) if "drawn" in i else 1
    yield from within("interval", found["interval"], want["interval"], tolerances.interval_radius(terms))


STATE_FLOATS = ("impact", "trunk_impact", "D", "weights", "mu", "sigma")

BOUNDED: dict[str, Bounded] = {
    "CC-ATTENTION": attention, "CC-SALIENCE": salience("sum"), "CC-MEAN-SALIENCE": salience("mean"),
    "CC-RARITY-FORMS": relative("CC-RARITY-FORMS", ["U"]), "CC-ROW-NORM": row_norm,
    "CC-RARITY": relative("CC-RARITY", ["U"]),
    "CC-TRUNK-WEIGHT": weights, "CC-CRYSTALLIZATION": crystallization, "CC-NORMALISED-IMPACT": normalised,
    "impact": relative("CC-IMPACT", ["M"]), "graph": graph, "score": score, "coattention": coattention,
    "prefill": prefill,
    **{item: nestedkv_item(name) for item, name in BOUNDED_RESULTS.items()}, "anomaly_score": anomaly_score,
    "inverse_key_norms": key_norms, "TA-SCORE": scored, "decay": decay,
    "segment_graph": relative("CC-TRUNK-WEIGHT", ["weights"]), "CC-TAIL-D": relative("CC-TAIL-D", ["D"]),
    "segment_crystallization": relative("CC-SEGMENT-D", ["D"]), "CC-START": relative("CC-SEGMENT", STATE_FLOATS),
    "CC-TAIL-TRUNKS": relative("CC-STEP", STATE_FLOATS), "CC-REEVICT": relative("CC-STEP", STATE_FLOATS),
    "CC-BREATH": relative("CC-STEP", STATE_FLOATS), "decode_step": relative("CC-STEP", STATE_FLOATS),
    "extend": relative("CC-SEGMENT", [*STATE_FLOATS, "inverse_norms"]),
    "IN-HALF-SPLIT": turned, "IN-INTERLEAVED": turned, "IN-WILSON": interval, "IN-BOOTSTRAP": interval,
    "IN-CLUSTER-BOOTSTRAP": interval, "IN-POWER": relative("IN-POWER", ["power"]),
    "IN-ENTROPY": relative("IN-ENTROPY", ["entropy"]), "IN-KEY-COSINE": cosines,
    "CC-CHUNK-TRUNKS": relative("CC-STEP", STATE_FLOATS),
}
