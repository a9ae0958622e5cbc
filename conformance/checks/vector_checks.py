"""Comparison of results with the expected results of a vector: bit for bit, or within a bound of `tolerances`.

spec/implementing.md describes each bound in words.
"""

import math
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.checks.failing_input import unequal
from conformance.checks.refusals import refused, unchecked
from conformance.vectors import files
from conformance.vectors.codec import Item, expanded, floats, integers, is_compact, mismatches, plain, record
from conformance.vectors.files import Json, decoded, nestedkv_parameters, parameters_of
from conformance.vectors.subject import attention_inputs, prompt
from spec.parameters import CrystalCacheParameters
from spec.parameters.crystalcache import HeadsForm
from spec.records import CoAttention, TrunkGraph, Trunks

Judge = Callable[[Any, Any, Any, CrystalCacheParameters, str], Iterator[str]]
STATE_FLOATS = "impact trunk_impact D weights mu sigma"


@dataclass(frozen=True)
class Bound:
    """Bounds of the results of an operation. Results without a bound are exact.

    Attributes:
        says: bound in words, by the names of the results, with spaces between names.
        judge: function that yields complaints about results. Its arguments are the results, the expected results, the
            inputs, the parameters and the precision of S1.
    """

    says: Mapping[str, str]
    judge: Judge

    @property
    def results(self) -> list[str]:
        """Return the names of the bounded results."""
        return [name for names in self.says for name in names.split()]


def units(item: str) -> str:
    """Return a relative bound of `conformance.tolerances` in words, in units of u."""
    bound = tolerances.BOUNDS[item, "float64"]
    n, absolute = bound.units, bound.absolute
    power = int(n).bit_length() - 1
    relative = f"relative `{'2^' + str(power) if n >= 2**13 else int(n)} u`"
    return f"{relative}, or absolute `2^{int(math.log2(absolute))}`" if absolute else relative


def within(name: str, got: Any, want: Any, radius: Any) -> Iterator[str]:
    """Compare element by element: the difference must be at most the radius, and NaN must be at the expected places."""
    a, b = floats(plain(got)), floats(want)
    if a.shape != b.shape or ((np.abs(a - b) > radius) | (np.isnan(a) != np.isnan(b))).any():
        yield f"{unequal(name, a, b)}; the bound is {np.max(radius)}"


def relative(item: str, *groups: str) -> Bound:
    """Return a bound: each of these results is within the item's tolerance of the expected result."""
    def judge(actual: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        for name in (name for names in groups for name in names.split()):
            got, expected = (np.atleast_1d(floats(plain(side[name]))) for side in (actual, want))
            if not tolerances.close(item, got, expected):
                yield unequal(name, got, expected)

    return Bound(dict.fromkeys(groups, units(item)), judge)


def at_radius(names: str, says: str, radius: Callable[[Any, Any, CrystalCacheParameters], Any]) -> Bound:
    """Return a bound: each of these results is within a radius of the expected result.

    The function `radius` computes the radius from the expected result, the inputs and the parameters.
    """
    def judge(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        for name in names.split():
            yield from within(name, result[name], want[name], radius(floats(want[name]), i, p))

    return Bound({names: says}, judge)


def by_scale(name: str) -> Bound:
    """Return a bound at the scale of a result's largest entry."""
    def judge(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
        if not tolerances.scores_agree(floats(plain(result[name])).ravel(), floats(want[name]).ravel().tolist()):
            yield f"{name} is {plain(result[name])}, not {want[name]}"

    return Bound({name: LARGEST}, judge)


def scored(actual: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Compare scores row by row, at the scale of the largest entry of the row."""
    for got, expected in zip(plain(actual["score"]), want["score"], strict=True):
        if not tolerances.scores_agree(got, expected):
            yield f"score is {got}, not {expected}"


def salience(heads: HeadsForm, sums: str) -> Bound:
    """Return the bound of salience from given columns, for this combination of the heads."""
    def radius(want: Any, i: Any, p: CrystalCacheParameters) -> Any:
        exact = [0.0] * len(i["own"][0])
        return tolerances.salience_radius(i["own"], exact, p.k_heads, p.M_min, "float64", heads)

    return at_radius("S", f"absolute `2 gamma(Q + k_heads + 2) x`, x the {sums} before the clip", radius)


def attention(want: Any, i: Any, p: CrystalCacheParameters) -> Any:
    q, k = floats(i["q"]), floats(i["k"])
    error = tolerances.attention_error(q, k, i["scaling"], i["softcap"], "float64", i.get("sinks"))
    return want * error[:, None]


def weights(result: Any, want: Any) -> Iterator[str]:
    if not tolerances.close("CC-TRUNK-WEIGHT", result["weights"], want["weights"]):
        yield f"weights are {plain(result['weights'])}, not {want['weights']}"


def graph(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Check weights by their bound, degrees from the weights in the result, and D from the degrees in the result."""
    yield from weights(result, want)
    offsets = integers(i["offsets"])
    yield from stage_checks.graph(TrunkGraph(**result), record(i), Trunks(offsets, np.ones(len(offsets) - 1)), p)


def impact_radius(M_bar: Any, protected: Any, p: CrystalCacheParameters) -> float:
    alive = [M for M, shut in zip(M_bar, protected, strict=True) if not shut]
    return tolerances.normalised_radius(alive, p.epsilon)


def score(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Check scores: a score that is D must be exact, and a score from impact is bounded."""
    radius = p.alpha * impact_radius(i["impact"], i["protected"], p)
    by_D = floats(want["score"]) == floats(i["D"])
    yield from within("score", result["score"], want["score"], np.where(by_D, 0, radius))


def coattention(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    yield from stage_checks.coattention(CoAttention(**result), attention_inputs(i, p), precision)


def prefill(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    """Check every record of the run, each from the record before it."""
    yield from stage_checks.retention(result["record"], prompt(i, p), precision)


def key_norms(actual: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    got, expected = floats(plain(actual["inverse_norms"])), floats(want["inverse_norms"])
    finite = np.isfinite(expected)
    if np.isfinite(got).tolist() != finite.tolist():
        yield unequal("inverse_norms", got, expected)
    else:
        radius = tolerances.key_norm_error(len(i["k"]), len(i["k"][0][0])) * expected[finite]
        yield from within("inverse_norms", got[finite], expected[finite].tolist(), radius)


def anomaly_score(result: Any, want: Any, i: Any, p: CrystalCacheParameters, precision: str) -> Iterator[str]:
    for h, head in enumerate(i["k"]):
        radius = tolerances.nestedkv_radius(head, nestedkv_parameters(i), precision)
        yield from within(f"score of head {h}", result["score"][h], want["score"][h], radius)


def resampled(want: Any, i: Any, p: CrystalCacheParameters) -> float:
    return tolerances.interval_radius(len(i["drawn"][0]) * len(i["differences"]))


LARGEST = f"absolute `2^{int(tolerances.SCORE_UNITS).bit_length() - 1} u x`, x the largest entry"
SETTLED = "absolute: the bound of CC-CRYSTALLIZATION"
OF_DEGREES = at_radius(
    "D", SETTLED, lambda want, i, p: tolerances.crystallization_radius(floats(i["degree"]), p.s, p.epsilon)
)
TURNED = at_radius(
    "turned", "absolute `16 u x`, x the norm of the token's channels",
    lambda want, i, p: tolerances.turn_radius(floats(i["x"])),
)
RESAMPLED = at_radius(
    "interval", "absolute `2 gamma(r n + 64)`, r the length of a row of `drawn`, n the number of differences",
    resampled,
)

BOUNDED: Mapping[str, Bound] = {
    "CC-ATTENTION": at_radius("A", "relative: twice the item's bound", attention),
    "CC-SALIENCE": salience("sum", "sum"), "CC-MEAN-SALIENCE": salience("mean", "mean"),
    "CC-ROW-NORM": at_radius(
        "rows", "relative `2 gamma(Q + 9)`",  # both sides have an error; one head
        lambda want, i, p: want * 2 * tolerances.gamma(len(i["A"]) + 1 + 8, "float64"),
    ),
    "coattention": Bound(
        {"salience intra intra_weight cross cross_weight": "the box of S1, see below"}, coattention,
    ),
    "CC-RARITY": relative("CC-RARITY", "U"), "CC-RARITY-FORMS": relative("CC-RARITY-FORMS", "U"),
    "impact": relative("CC-IMPACT", "M"),
    **dict.fromkeys(("CC-TRUNK-WEIGHT", "segment_graph"), relative("CC-TRUNK-WEIGHT", "weights")),
    "graph": Bound(
        {"weights": units("CC-TRUNK-WEIGHT"), "degree": "exact: CC-DEGREE of the weights that were found",
         "D": f"{SETTLED}, from the degrees that were found"}, graph,
    ),
    "CC-CRYSTALLIZATION": OF_DEGREES, "segment_crystallization": OF_DEGREES,
    "CC-NORMALISED-IMPACT": at_radius(
        "M_tilde", "absolute: the bound of CC-NORMALISED-IMPACT",
        lambda want, i, p: impact_radius(i["M_bar"], i["protected"], p),
    ),
    "score": Bound(
        {"score": "exact where D wins, else absolute: alpha times the bound of CC-NORMALISED-IMPACT"}, score,
    ),
    "prefill": Bound({"scores D": "as `graph` and `score`, each from the records of the same run"}, prefill),
    "inverse_key_norms": Bound({"inverse_norms": "relative `2 gamma(d + H_kv + 8)`"}, key_norms),
    "decay": at_radius(
        "D", "absolute `12 u x`, x the D before", lambda want, i, p: tolerances.decay_radius(floats(i["D"])),
    ),
    "CC-TAIL-D": relative("CC-TAIL-D", "D"),
    **dict.fromkeys(
        ("CC-TAIL-TRUNKS", "CC-CHUNK-TRUNKS", "CC-REEVICT", "CC-BREATH", "decode_step"),
        relative("CC-STEP", STATE_FLOATS),
    ),
    "CC-START": relative("CC-SEGMENT", STATE_FLOATS), "extend": relative("CC-SEGMENT", STATE_FLOATS, "inverse_norms"),
    "NK-UNIT-KEYS": by_scale("unit"),
    **dict.fromkeys(("NK-STABLE", "NK-EPISODIC", "NK-CURRENT"), by_scale("mu")),
    **dict.fromkeys(("NK-ANOMALY", "NK-MIN-MAX"), by_scale("a")),
    "NK-GAP": by_scale("delta"), "NK-BLEND": by_scale("blend"), "NK-SURPRISE": by_scale("s"),
    **dict.fromkeys(("NK-ROUTE", "NK-SCORE"), by_scale("score")),
    "anomaly_score": Bound({"score": "absolute: the bound of NK-SCORE, see below"}, anomaly_score),
    "TA-SCORE": Bound({"score": f"{LARGEST} of its row"}, scored),
    "IN-HALF-SPLIT": TURNED, "IN-INTERLEAVED": TURNED,
    "POS-TURN": at_radius(
        "turned", "absolute `16 u x`, x the norm of the token's channels",
        lambda want, i, p: tolerances.turn_radius(floats(i["keys"])),
    ),
    "IN-KEY-COSINE": at_radius(
        "raw unrotated", "absolute `64 d u`",
        lambda want, i, p: tolerances.key_cosine_error(len(i["fresh"][0][0])),
    ),
    "IN-WILSON": at_radius("interval", "absolute `2 gamma(65)`", lambda want, i, p: tolerances.interval_radius(1)),
    "IN-BOOTSTRAP": RESAMPLED, "IN-CLUSTER-BOOTSTRAP": RESAMPLED,
    "IN-ENTROPY": relative("IN-ENTROPY", "entropy"), "IN-POWER": relative("IN-POWER", "power"),
}
"""Bounded results of each operation, stage or item. All other results are exact."""


def cases(operations: Container[str]) -> list[Any]:
    """Return group and test of the published vectors of these operations, as parameters of pytest.

    Each case has the marks of its items, with the composed item first.
    """
    return [
        pytest.param(group, test, id=f"{stage}-{test['tcId']}", marks=pytest.mark.spec(*test["items"][::-1]))
        for stage, group, test in files.published() if group["operation"] in operations
    ]


def problems(
    group: Json, test: Json, run: Item, bounded: Mapping[str, Bound], precision: str,
) -> list[str]:
    """Run an operation on a published test and return the complaints about the results.

    If the vector is invalid, the operation must raise a SpecError, otherwise an assertion fails.
    """
    p, inputs = parameters_of(decoded(group["parameters"])), expanded(decoded(test["inputs"]))
    if test["result"] == "invalid":
        with unchecked(), refused(test["expected"]["argument"]):
            run(inputs, p)
        return []
    given = {**decoded(test), "inputs": inputs}
    return list(complaints(run(inputs, p), given, bounded.get(group["operation"]), p, precision))


def complaints(
    result: Mapping[str, Any], test: Json, bound: Bound | None, p: CrystalCacheParameters, precision: str,
) -> Iterator[str]:
    """Yield the complaints about the results of one decoded test.

    If an expected result is compact, the summary of the result is compared, even for results with a tolerance. `bound`
    checks all other results with a tolerance.
    """
    short = {name: want for name, want in test["expected"].items() if is_compact(want)}
    bounded = [name for name in test.get("bounded", []) if name not in short]
    wrong = [
        problem for name, want in short.items() for problem in mismatches(name, plain(result[name]), want)
    ]
    wrong += [
        f"{name} is {plain(result[name])}, not {want}" for name, want in test["expected"].items()
        if name not in bounded and name not in short and not same(plain(result[name]), want)
    ]
    yield from wrong
    if bounded and not wrong:
        assert bound is not None
        yield from bound.judge(result, test["expected"], test["inputs"], p, precision)


def same(got: Any, want: Any) -> bool:
    """Return True if two values are equal in structure, in type and to the bit. Any NaN equals any other NaN."""
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float) and isinstance(got, float):
        return struct.pack("d", got) == struct.pack("d", want) or (got != got and want != want)
    return type(got) is type(want) and bool(got == want)
