"""Bounds of what the reference gives for the vectors of items."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance import tolerances
from conformance.assurance.vector_writer.expected_nestedkv import BOUNDED as NESTEDKV_BOUNDED
from conformance.checks.vector_checks import (
    STATE_FLOATS,
    Bounded,
    crystallization,
    impact_radius,
    relative,
    weights,
    within,
)
from conformance.vectors.arrays import floats, plain
from spec.parameters import CrystalCacheParameters
from spec.parameters.crystalcache import HeadsForm

__all__ = ["BOUNDED_ITEMS"]


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


def normalised(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    yield from within("M_tilde", found["M_tilde"], want["M_tilde"], impact_radius(i["M_bar"], i["protected"], p))


def nestedkv_item(name: str) -> Bounded:
    """An item's result, at the scale of its largest entry."""
    def judge(found: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        if not tolerances.scores_agree(floats(plain(found[name])).ravel(), floats(want[name]).ravel().tolist()):
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


BOUNDED_ITEMS: Mapping[str, Bounded] = {
    "CC-ATTENTION": attention, "CC-SALIENCE": salience("sum"), "CC-MEAN-SALIENCE": salience("mean"),
    "CC-ROW-NORM": row_norm, "CC-TRUNK-WEIGHT": weights, "CC-CRYSTALLIZATION": crystallization,
    "CC-NORMALISED-IMPACT": normalised, "CC-RARITY": relative("CC-RARITY", ["U"]),
    "CC-RARITY-FORMS": relative("CC-RARITY-FORMS", ["U"]), "CC-TAIL-D": relative("CC-TAIL-D", ["D"]),
    "CC-START": relative("CC-SEGMENT", STATE_FLOATS),
    **dict.fromkeys(
        ("CC-TAIL-TRUNKS", "CC-CHUNK-TRUNKS", "CC-REEVICT", "CC-BREATH"), relative("CC-STEP", STATE_FLOATS)
    ),
    **{item: nestedkv_item(name) for item, name in NESTEDKV_BOUNDED.items()}, "TA-SCORE": scored,
    "IN-HALF-SPLIT": turned, "IN-INTERLEAVED": turned, "IN-WILSON": interval, "IN-BOOTSTRAP": interval,
    "IN-CLUSTER-BOOTSTRAP": interval, "IN-POWER": relative("IN-POWER", ["power"]),
    "IN-ENTROPY": relative("IN-ENTROPY", ["entropy"]), "IN-KEY-COSINE": cosines,
}
