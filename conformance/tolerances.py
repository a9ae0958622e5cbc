"""Tolerances of all comparisons: certified error bounds by item and precision, each with its reason.

Decisions, such as a neighbour list or an eviction order, jump at ties. Therefore a decision is accepted
exactly if some values within the certified radius lead to this decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.oracles import nestedkv, s1
from spec.arrays import Vector
from spec.parameters import NestedKVParameters

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}
# Relative to the largest log-probability: float32 sums of engines have other orders and differ by some 1e-6.
MASKED_LOGITS = 1e-4
MASKED_VISIBLE = 1e-2  # Minimum change by masking. After a smaller change, a comparison with masking proves nothing.
NEGLIGIBLE = 2.0**-16  # Bound of NestedKV's ranges and memories, and least factor of a weight that may be zero.
SMALL_D = 2.0**-178  # exp(-123): the relative error of a smaller D grows with the logarithm of D
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126}


@dataclass(frozen=True)
class Bound:
    """Bound of a relative error, in units of the precision's roundoff u. Differences up to `absolute` are ignored."""

    units: float
    reason: str
    absolute: float = 0.0


# S2 to S6 are float64 in every backend, so one precision is enough. The radii of S1 are computed below.
BOUNDS: dict[tuple[str, str], Bound] = {
    ("CC-RARITY", "float64"): Bound(16, "a logarithm within 4 ulp (8 u), two roundings; the oracle's own the same"),
    ("CC-RARITY-FORMS", "float64"): Bound(
        16, "an exponential within 4 ulp (8 u); the oracle's own the same; below 2^-1022 an ulp is more", 2.0**-1022
    ),
    ("CC-IMPACT", "float64"): Bound(24, "rarity's 16 u; then at most four roundings of a moved term on either side"),
    ("CC-TRUNK-IMPACT", "float64"): Bound(0, "three terms in a stated order and one division: the same bits"),
    ("CC-TRUNK-WEIGHT", "float64"): Bound(8, "sum in a stated order; a square root within 1 ulp; four roundings"),
    ("CC-DEGREE", "float64"): Bound(0, "a sum in a stated order of given weights: the same bits"),
    ("CC-TAIL-D", "float64"): Bound(
        512, "the logistic of x, a quotient and a product: 2 |x| u + 8 u on either side, |x| up to 123", SMALL_D
    ),
    ("CC-STEP", "float64"): Bound(
        1024, "CC-DECAY, CC-TAIL-D and CC-IMPACT in one; pulses and Eq. 34 round D twice each", SMALL_D
    ),
    ("CC-SEGMENT", "float64"): Bound(
        4096, "of the vectors alone: S1 exact and degrees far apart by their choice, so D errs little for its size"
    ),
    ("IN-POWER", "float64"): Bound(
        2**18, "two exponentials of three log-gammas each: up to 5912 for n = 1000, within 4 ulp (2^15 u)"
    ),
    ("IN-ENTROPY", "float64"): Bound(
        256, "terms of one sign: a logarithm within 4 ulp, a product, and as many roundings as slots, of both sides"
    ),
    ("PO-CHUNKS", "float64"): Bound(
        64, "terms of one sign: a logarithm within 4 ulp, a product and a sum that is rounded once, on both sides; the"
        " logarithm of a share near 1 errs by the rounding of the share", 2.0**-50
    ),
    ("CC-DISSOLVE-D", "float64"): Bound(0, "one quotient, correctly rounded, and one product: the same bits"),
}


@dataclass(frozen=True)
class Interval:
    """Interval of the values of a correct implementation."""

    low: float
    high: float

    @classmethod
    def around(cls, centre: float, radius: float) -> "Interval":
        return cls(centre - radius, centre + radius)

    def __contains__(self, x: float) -> bool:
        return self.low <= x <= self.high


def close(item: str, got: Sequence[float] | Vector, want: Sequence[float] | Vector) -> bool:
    """Return True if every value is within the item's bound of the expected value. NaN equals NaN."""
    bound = BOUNDS[item, "float64"]
    units = bound.units * UNIT_ROUNDOFF["float64"]
    a, b = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    if a.shape != b.shape:
        return False
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return bool((same | (np.abs(a - b) <= units * np.maximum(np.abs(a), np.abs(b)) + bound.absolute)).all())


# Policies are compared on small inputs: at most 64 keys of 16 channels, logits below 64 in size. The relative error of
# a weight is then expm1(4 e) with e = gamma(24) 64, about 6200 u, plus gamma(80) for its sums. A score has at most
# three such steps. R-KV and Expected Attention subtract or weigh terms of the row's size, so the scale is the row's
# largest entry.
SCORE_UNITS = 2.0**15


def scores_agree(
    got: Sequence[float] | Vector, want: Sequence[float | None], precision: str = "float64",
) -> bool:
    """Return True if scores are within SCORE_UNITS of an oracle's scores. None means NaN, a token without a score."""
    a, b = np.asarray(got, dtype=np.float64), np.array([np.nan if x is None else x for x in want], dtype=np.float64)
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= SCORE_UNITS * UNIT_ROUNDOFF[precision] * scale
    return a.shape == b.shape and bool((near | (a == b) | (np.isnan(a) & np.isnan(b))).all())


def turn_radius(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the radius of a rotated channel.

    Cosine and sine are within 1 ulp, and two products and a sum follow, on both sides: 16 u in all. The radius is
    relative to the token's norm, which is at least the norm of the pair of channels.
    """
    radius: np.ndarray[Any, Any] = 16 * UNIT_ROUNDOFF["float64"] * np.sqrt((x * x).sum(-1, keepdims=True))
    return radius


def interval_radius(terms: int) -> float:
    """Return the radius of an end of an interval inside [-1, 1].

    The bound covers sums of `terms` terms, a root and a quotient, on both sides.
    """
    return 2 * gamma(terms + 64, "float64")


def gamma(terms: float, precision: str) -> float:
    """Return Higham's gamma_n = n u / (1 - n u): the relative error of n roundings in any order, fused or not."""
    nu = terms * UNIT_ROUNDOFF[precision]
    return nu / (1 - nu)


def attention_error(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], scaling: float, softcap: float | None, precision: str,
    sinks: Any = None,
) -> Vector:
    """Return a bound on the relative error of each attention weight, by query row.

    A logit has an error of gamma_(d+8) of its mass sum |q||k| scaling (inner product, scaling, subtraction of the
    maximum). A soft cap (slope at most 1) adds 8 u softcap, and sinks add 8 u of the largest sink. The exponential
    turns this into a relative error of numerator and denominator. The sum of n powers and the 4 ulp of the exponentials
    add gamma_(n+16). The oracle has the same error in float64, which is added.
    """
    group = len(q) // len(k)
    shared = np.repeat(np.abs(k.astype(np.float64)), group, axis=0)
    mass = np.matmul(np.abs(q.astype(np.float64)), shared.transpose(0, 2, 1)).max(axis=(0, 2)) * scaling
    return weight_error(mass, q.shape[2], k.shape[1], softcap, precision, sinks)


def weight_error(
    mass: Vector, d: int, keys: int, softcap: float | None, precision: str, sinks: Any = None,
) -> Vector:
    """Return the bound of `attention_error` from given masses: the largest mass of each row among all keys."""
    error, largest = np.zeros(len(mass)), (softcap or 0.0) + float(np.abs(sinks).max() if sinks is not None else 0.0)
    for p in (precision, "float64"):
        logit = gamma(d + 8, p) * mass + 8 * UNIT_ROUNDOFF[p] * largest
        error = error + np.expm1(4 * logit) + gamma(keys + 16, p)
    bound: Vector = error
    return bound


def salience_radius(
    weights: Any, row_error: Sequence[float] | Vector, k_heads: int, M_min: float, precision: str, heads: str = "sum",
) -> Vector:
    """Return the radius of Eq. 11 by token, from a block (H, Q, Q).

    The error of a top-k sum is at most the sum of the k largest errors. The error of a mean over heads is at most the
    mean of the errors of the heads. Clipping does not increase the error of its argument. The clip bounds are rounded
    to the precision, and rounded again if they are scaled for a mean: 2 M_min u.
    """
    A, e = np.asarray(weights, dtype=np.float64), np.asarray(row_error, dtype=np.float64)
    terms = A.shape[1] + k_heads + 2
    rounding = gamma(terms, precision) + gamma(terms, "float64")
    moves = np.einsum("hij,i->hj", A, e + rounding * (1 + e))
    floor = SMALLEST[precision] + (0.0 if precision == "float64" else 2 * UNIT_ROUNDOFF[precision] * M_min)
    share = max(1, min(k_heads, len(A))) if heads == "mean" else 1
    radius: Vector = np.sort(moves, axis=0)[::-1][:k_heads].sum(axis=0) / share + floor
    return radius


def moved_salience_radius(
    salience: Vector, moves: Vector, Q: int, k_heads: int, M_min: float, precision: str,
) -> Vector:
    """Return the radius of Eq. 11 by token, from precomputed sums.

    `salience` is the sum over the best heads, and `moves` is the sum over the best heads of rows times error. Each sum
    contains at most the k_heads largest values. Therefore the best heads of one sum bound the other sum.
    """
    rounding = gamma(Q + k_heads + 2, precision) + gamma(Q + k_heads + 2, "float64")
    floor = SMALLEST[precision] + (0.0 if precision == "float64" else 2 * UNIT_ROUNDOFF[precision] * M_min)
    radius: Vector = moves * (1 + rounding) + rounding * salience + floor
    return radius


def head_mean_error(H: int, precision: str) -> float:
    """Return a bound on the relative error that the mean over heads adds to its weights.

    The bound includes the oracle's error.
    """
    return gamma(H + 2, precision) + gamma(H + 2, "float64")


def cosine_error(e_i: Any, e_j: Any, Q: int, H: int, precision: str) -> Any:
    """Return a bound on the relative error of a cosine of non-negative rows, whose entries have the errors e_i and e_j.

    The errors are broadcast. The inner product and both norms are monotone in the entries. The product grows by at most
    (1 + e) of both rows, and the norms shrink by (1 - e). Rounding adds gamma of the lengths of the two sums.
    """
    rounding = gamma(3 * Q + 2 * H + 24, precision) + gamma(3 * Q + 2 * H + 24, "float64")
    up, down = (np.log1p(e_i) + np.log1p(e_j), sum(np.log(np.maximum(1.0 - e, NEGLIGIBLE)) for e in (e_i, e_j)))
    return np.expm1(up - down + math.log1p(rounding)) * 1.01


def list_is_realisable(
    chosen: Sequence[int], boxes: dict[int, Interval], k: int, tau: float,
) -> bool:
    """Return True if, for some weights inside their boxes, `chosen` are the k largest weights above tau.

    The keys are float32, and of equal keys the lower index comes first. Values are assigned greedily from the best
    place down, as high as the list allows. If these values fail, all values fail.
    """
    if len(chosen) > k or len(set(chosen)) < len(chosen) or not set(chosen) <= boxes.keys():
        return False
    threshold = s1.float32(tau)
    above, index = math.inf, -1
    for j in chosen:
        x = s1.float32(boxes[j].high)
        if x >= above:
            x = above if j > index else float(np.nextafter(np.float32(above), np.float32(-np.inf)))
        if x < s1.float32(boxes[j].low) or x <= threshold:
            return False
        above, index = x, j
    for j in boxes.keys() - set(chosen):
        least = s1.float32(boxes[j].low)
        if least > threshold and (len(chosen) < k or (least, -j) > (above, -index)):
            return False
    return True


def decay_radius(D: Vector) -> Vector:
    """Return the radius of Eq. 36.

    rho is at most 1 and has an error of 4 u and three roundings, on both sides. D may be subnormal.
    """
    radius: Vector = 12 * UNIT_ROUNDOFF["float64"] * D + SMALLEST["float64"]
    return radius


def key_norm_error(H_kv: int, d: int) -> float:
    """Return a bound on the relative error of a mean inverse norm: a sum of d squares, its root, and a sum over heads.

    The computation is float64 in every backend, and the oracle has the same error. The bound is for norms in [2^-1000,
    2^1000]. A key whose squares overflow or underflow float64 is scaled exactly, by a power of two.
    """
    return 2 * gamma(d + H_kv + 8, "float64")


def crystallization_radius(degree: Vector, s: float, epsilon: float, moved: float = 0.0) -> float:
    """Return the radius of Eq. 27 from degrees with an error of `moved`.

    The slope of the logistic function is at most 1/4. Its error is 8 u. mu has an error of gamma_(m+2) of the largest
    degree. An absolute error in every term changes sigma by at most this error. This moves z by the ratio
    to sigma, times 1 + |z|. If sigma may be below or above epsilon, D may have any value.
    """
    m = len(degree)
    mu = math.fsum(degree.tolist()) / m
    sigma = math.sqrt(math.fsum((x - mu) ** 2 for x in degree.tolist()) / m)
    error = gamma(2 * m + 8, "float64") * float(np.abs(degree).max()) + moved
    if abs(sigma - epsilon) <= error + gamma(m + 8, "float64") * sigma:
        return 1.0
    if sigma < epsilon:
        sigma = 1.0
    z = max(abs(x - mu) for x in degree.tolist()) / sigma
    move = (error * (1 + z) / sigma + gamma(m + 8, "float64") * z) * s
    return move / 4 + 8 * UNIT_ROUNDOFF["float64"]


def settled_radius(degree: Vector, s: float, epsilon: float) -> float:
    """Return the radius of D, mu and sigma after a segment: Eq. 27 from degrees that have an error.

    Weights have an error of 8 u, and a sum of m weights rounds on both sides: gamma_(2m+8). This error moves a degree
    minus mu twice.
    """
    moved = gamma(2 * len(degree) + 24, "float64") * 2 * float(np.abs(degree).max())
    return crystallization_radius(degree, s, epsilon, moved) + moved


def key_cosine_error(d: int) -> float:
    """Return the radius of IN-KEY-COSINE.

    The bound covers 8 u of the rotation of each pair on both keys, and three sums of d products, on both sides.
    """
    return 64 * d * UNIT_ROUNDOFF["float64"]


def normalised_radius(M_bar: Sequence[float], epsilon: float) -> float:
    """Return the radius of Eq. 28.

    Each logarithm has an error of 4 ulp, which is 8 u on each side. The quotient adds four times this relative error.
    """
    ell = [math.log1p(x) for x in M_bar]
    u = UNIT_ROUNDOFF["float64"]
    return 64 * u * max(ell) / (max(ell) - min(ell) + epsilon) + 8 * u


def received_radius(weights: np.ndarray[Any, Any], error: Vector, precision: str) -> Vector:
    """Return the radius by key of a sum of weights (rows, n), whose rows have the errors `error` (rows,).

    The radius is the sum of these errors and gamma of the sum. A power of 2 below the normal numbers may be 0.
    """
    terms = len(weights) + 8
    rounding = gamma(terms, precision) + gamma(terms, "float64")
    radius: Vector = np.einsum("rn,r->n", weights, error + rounding * (1 + error)) + terms * SMALLEST[precision]
    return radius


def expected_error(mass: float, m: int, d: int, keys: int, precision: str) -> float:
    """Return a bound on the relative error of an expected weight, from the largest mass of a logit's terms.

    Each term has the errors of a sum over m queries, of four sums over d channels, of the angles (16 u), and of
    scalings. Two of the four sums are rotations, and two are the quadratic form. The softmax follows as in
    `attention_error`. The value's norm and the group's mean add 4 d.
    """
    error = 0.0
    for p in (precision, "float64"):
        error += math.expm1(4 * gamma(m + 4 * d + 64, p) * mass) + gamma(keys + 4 * d + 64, p)
    return error


def nestedkv_radius(head: Sequence[Sequence[float]], p: NestedKVParameters, precision: str) -> float:
    """Return the radius of a* of one head's keys: cosines in `precision`, the rest in float64.

    The radius is 1 if nothing is certain. A unit key has an error of gamma_(d+8). A memory adds gamma of its terms. In
    float64 these are n terms (running sums over the prompt, n / W times the window). In float32 these are the terms of
    a block, and for a window three sums of W unit keys. A cosine divides the error by the memory's length, and a
    normalised value by the range. The oracle's error is added in float64.
    """
    result = nestedkv.traced(head, p)
    return traced_radius(len(head), len(head[0]), result.raw, result.shortest, result.deviation, p, precision)


def traced_radius(
    n: int, d: int, readings: Sequence[Sequence[float]], lengths: Sequence[float], deviation: Sequence[float],
    p: NestedKVParameters, precision: str,
) -> float:
    """Return the radius of `nestedkv_radius` from intermediate values of an oracle.

    Args:
        n: number of keys.
        d: number of channels of a key.
        readings: anomalies of each scale before normalisation.
        lengths: lengths of the shortest memories.
        deviation: deviations of the keys.
        p: parameters of NestedKV.
        precision: precision of the cosines.
    """
    b = min(max(n // p.blocks, p.b_min), p.b_max)
    e = 0.0
    for raw, shortest, scale in zip(readings, lengths, range(3), strict=True):
        cosine = 0.0
        for kind in (precision, "float64"):
            terms, share = (min(b, n) + 8 if kind == "float32" else n + 16), 1.0
            if scale == 2:
                terms, share = (p.W + 8, 3.0) if kind == "float32" else (n + 16, max(1.0, 2 * n / p.W))
            memory = gamma(d + 8, kind) + gamma(terms, kind) * share
            cosine += 2 * (gamma(2 * d + 16, kind) + memory / max(shortest - memory, SMALLEST["float32"]))
            if shortest <= NEGLIGIBLE + memory:
                return 1.0
        e = max(e, _normalised_error(raw, cosine))
    u = UNIT_ROUNDOFF["float64"]
    blend = e + math.expm1(min(1.0, 2 * p.beta * 2 * (e + gamma(n + 8, "float64")))) + 16 * u
    surprise = 2 * _normalised_error(deviation, e + 8 * u) + gamma(n + 8, "float64")
    return min(1.0, blend + p.kappa / 4 * surprise + e + 32 * u)


def _normalised_error(row: Sequence[float], error: float) -> float:
    """Return the error of values with an error of `error` after they are moved to [0, 1].

    The error is 1 if rounding decides whether the range counts as zero.
    """
    spread = max(row) - min(row)
    if spread + 2 * error <= NEGLIGIBLE:
        return 0.0
    if spread - 2 * error <= NEGLIGIBLE:
        return 1.0
    return 4 * error / (spread - 2 * error) + 4 * UNIT_ROUNDOFF["float64"]
