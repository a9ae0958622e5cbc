"""Search for the largest distance between admissible results, as a ratio to the radius that accepts them.

The inputs are random and adversarial. The sides are the reference, the oracle, and the oracle with the least accurate
admissible math library, in four patterns of signs. Each side is measured from the real value, which balls enclose. A
ratio above 1 is a counterexample. A ratio below 1 is no proof.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np

from conformance import tolerances
from conformance.oracles import decode, nestedkv, s1, s3, s4, s5
from lab.proofs.floats.balls import Ball, Undecided, exact, hostile
from reference.crystalcache import breath, coattention, crystallization, impact, score, tail
from reference.crystalcache.activation import inverse_key_norms
from reference.nestedkv import anomaly_score
from spec.parameters import PAPER, NestedKVParameters

U = 2.0**-53
LARGE = 2.0**200  # scale that keeps errors below the smallest normal number
Draw = np.random.Generator
SMALL = NestedKVParameters(blocks=2, b_min=2, b_max=4, W=3)


@dataclass(frozen=True)
class Case:
    """Bound with inputs, the oracle's and the reference's function of the inputs, and the radius of each result."""

    item: str
    bound: str
    draw: Callable[[Draw], Sequence[Any]]
    oracle: ModuleType
    formula: Callable[..., Sequence[Any]]
    reference: Callable[..., Any]
    radius: Callable[..., Any]


def lifted(x: Any) -> Any:
    """Return nested lists with the numbers as balls."""
    if isinstance(x, list):
        return [lifted(y) for y in x]
    return Ball(x) if isinstance(x, float | int) and not isinstance(x, bool) else x


def worst(case: Case, number: int, seed: int = 0) -> tuple[float, Sequence[Any]]:
    """Return the largest ratio among this number of inputs, and its inputs. Skip inputs that balls cannot decide."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(2, size=997)
    signs: tuple[Callable[[int], int], ...] = (
        lambda n: 1, lambda n: -1, lambda n: 1 - 2 * (n % 2), lambda n: int(1 - 2 * bits[n % 997]),
    )
    real, sides = exact(case.oracle), [case.oracle, *(hostile(case.oracle, one) for one in signs)]
    result: tuple[float, Sequence[Any]] = (-1.0, ())
    for _ in range(number):
        inputs = case.draw(rng)
        with suppress(Undecided):
            result = max(result, (ratio(case, inputs, real, sides), inputs), key=lambda pair: pair[0])
    return result


def ratio(case: Case, inputs: Sequence[Any], real: Any, sides: Sequence[Any]) -> float:
    """Return the largest distance over the radius, between two sides or between a side and the real value."""
    values = [case.formula(side, *inputs) for side in sides]
    values.append(np.asarray(case.reference(*inputs)).ravel().tolist())
    wanted = [Ball(x) for x in case.formula(real, *lifted(list(inputs)))]
    errors = np.array([[float((x - y) * LARGE) for x, y in zip(wanted, side, strict=True)] for side in values])
    apart = np.maximum(errors.max(axis=0), 0) - np.minimum(errors.min(axis=0), 0)
    radius = LARGE * np.broadcast_to(case.radius(*inputs, np.abs(np.array(values)).max(axis=0)), apart.shape)
    return float(np.divide(apart, radius, out=np.where(apart > 0, np.inf, 0.0), where=radius > 0).max())


def relative(item: str) -> Callable[..., Any]:
    bound = tolerances.BOUNDS[item, "float64"]
    return lambda *given: bound.units * U * given[-1] + bound.absolute


def size(rng: Draw, most: int = 12) -> int:
    return int(rng.integers(1, most))


def spread(rng: Draw, n: int) -> list[float]:
    """Return positive numbers of one of several kinds.

    The kinds are: similar sizes, all sizes, nearly equal, equal, just above powers of 2, and one number far above the
    rest.
    """
    base = float(rng.choice([0.1, 1.0, 3.0, 1e3]))
    kinds = (
        rng.uniform(0, base, n), 10.0 ** rng.uniform(-14, 2, n), base * (1 + rng.uniform(0, 1e-13, n)),
        np.full(n, base), 2.0 ** rng.integers(-3, 4, n) * (1 + 4 * U), base * (1 + 1e-8 * rng.choice([-1, 1], n)),
        np.where(np.arange(n) == 0, 1e4, base), base + rng.uniform(0, 3e-8, n), np.zeros(n),
    )
    return [float(x) for x in kinds[rng.integers(len(kinds))]]


def near_epsilon(rng: Draw, n: int) -> list[float]:
    """Return degrees with a deviation of about epsilon."""
    step = PAPER.epsilon * (1 + float(rng.integers(-2, 3)) * U)
    base = float(rng.choice([step, 0.1, 1.0]))
    return [base + step * (1 if g % 2 else -1) for g in range(2 * n)]


def degrees(rng: Draw) -> list[float]:
    n = size(rng, 40)
    return near_epsilon(rng, n) if rng.random() < 0.2 else spread(rng, n)


def settled(rng: Draw) -> tuple[list[float], list[float], Any]:
    """Return degrees, and the degrees from weights with errors of 8 u."""
    degree = degrees(rng)
    return degree, [x * (1 + 8 * U * float(rng.choice([-1, 1]))) for x in degree], sloped(rng)


def sloped(rng: Draw) -> Any:
    return replace(PAPER, s=float(rng.choice([0.5, 5.0, 50.0])))


def logarithms(rng: Draw) -> list[float]:
    """Return trunk impacts. The logarithm of some impacts is just above a power of 2."""
    if rng.random() < 0.5:
        return spread(rng, size(rng))
    return [float(x) for x in np.expm1(2.0 ** rng.integers(-2, 4, size(rng)) * (1 + 1e-15))]


def counts(rng: Draw) -> list[int]:
    """Return counts up to 2^23. For most counts, the logarithm of count + 1 is near a power of 2."""
    about = np.exp(2.0 ** rng.integers(0, 4, 8)).astype(int) + rng.integers(-2, 3, 8)
    return [int(c) for c in np.clip(np.where(rng.random(8) < 0.7, about, rng.integers(1, 2**23, 8)), 1, 2**23)]


def faded(rng: Draw) -> tuple[list[float], list[float], Any]:
    n = size(rng)
    D = [float(x) for x in (rng.uniform(0, 1, n), 10.0 ** rng.uniform(-300, 0, n), 5e-324 * rng.integers(0, 9, n))[
        rng.integers(3)]]
    M = np.where(rng.random(n) < 0.3, 0.0, rng.uniform(0, 20, n)).tolist()
    return D, M, replace(PAPER, beta_0=float(rng.choice([0.05, 0.5, 0.95, 1.0])))


def tails(rng: Draw) -> tuple[float, float, Any]:
    """Return mu and sigma.

    The values are arbitrary, or have the largest rounding error among many values with exponents from -122 on. In
    this range the bound is relative.
    """
    if rng.random() < 0.5:
        return float(rng.uniform(0, 30)), float(10 ** rng.uniform(-3, 1)), PAPER
    many = [(mu, PAPER.s * mu / float(rng.uniform(64, 122))) for mu in rng.uniform(1, 30, 64).tolist()]
    return *max(many, key=lambda one: rounded_apart(*one)), PAPER


def rounded_apart(mu: float, sigma: float) -> Fraction:
    """Return the distance between the exact s mu / sigma and the float values of both orders of operations."""
    real = Fraction(PAPER.s) * Fraction(mu) / Fraction(sigma)
    sides = (real, Fraction(PAPER.s * mu / sigma), Fraction(PAPER.s * (mu / sigma)))
    return max(sides) - min(sides)


def block(rng: Draw, H: int, Q: int) -> Any:
    """Return attention of heads. Rows are peaked or flat, and sum to 1 or to almost 0."""
    A = rng.dirichlet(np.full(Q, float(rng.choice([0.01, 0.1, 1.0]))), (H, Q))
    return (A * 10.0 ** float(rng.choice([0, -3, -9]))).tolist()


def rows(rng: Draw) -> tuple[list[list[float]], list[list[float]], float]:
    """Return two rows with some shared entries, and a copy changed by a share.

    In the copy, the shared entries are larger and all other entries are smaller, or the reverse.
    """
    Q, share = size(rng) + 2, float(rng.choice([0.0, 1e-3, 0.05, 0.3]))
    A = np.where(rng.random((2, Q)) < 0.4, 0.0, 10.0 ** rng.uniform(-4, 0, (2, Q))) + np.eye(2, Q) + np.eye(Q)[-1] / 99
    side = float(rng.choice([-1, 1]))
    return A.tolist(), (A * np.where(A.all(axis=0), 1 + side * share, 1 - side * share)).tolist(), share


def keys(rng: Draw, n: int, d: int, farthest: int = 3) -> Any:
    """Return random keys, almost equal keys, or keys of very different lengths, some up to 10^`farthest`."""
    most = farthest if rng.random() < 0.3 else 3
    k = rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-most, most, (n, 1))
    same = rng.normal(size=d) + 10.0 ** float(rng.uniform(-9, -1)) * rng.normal(size=(n, d))
    return (k if rng.random() < 0.5 else same).tolist()


def attended(rng: Draw) -> Sequence[Any]:
    H, n, d = int(rng.choice([1, 2])), size(rng, 6) + 1, size(rng, 8)
    q, k = rng.normal(size=(H, n, d)) * 10.0 ** rng.uniform(-1, 1.5), rng.normal(size=(1, n, d))
    return q.tolist(), k.tolist(), float(d**-0.5), None if rng.random() < 0.5 else 3.0


def attention_radius(q: Any, k: Any, scaling: float, softcap: float | None, sizes: Any) -> Any:
    error = tolerances.attention_error(np.array(q), np.array(k), scaling, softcap, "float64")
    return sizes * np.tile(np.repeat(error, len(k[0])), len(q)) + tolerances.SMALLEST["float64"]


def flat(nested: Any) -> list[Any]:
    return [x for y in nested for x in flat(y)] if isinstance(nested, list) else [nested]


def places(q: Any) -> list[int]:
    return list(range(len(q[0])))


def reference_attention(q: Any, k: Any, scaling: float, softcap: float | None) -> Any:
    at = np.arange(len(q[0]))
    return coattention.attention(np.array(q), np.array(k), at, at, scaling, softcap)


CASES = (
    Case(
        "CC-SCORE", "normalised_radius",
        lambda rng: (logarithms(rng), replace(PAPER, alpha=float(rng.choice([1, 0.7])))), s5,
        lambda s5, M, p: list(s5.score([0.0] * len(M), M, range(len(M)), p).values()),
        lambda M, p: score.score(
            np.zeros(len(M)), score.normalised_impact(np.array(M), np.zeros(len(M), dtype=np.bool_), p.epsilon), p.alpha
        ),
        lambda M, p, sizes: p.alpha * tolerances.normalised_radius(M, p.epsilon),
    ),
    Case(
        "CC-CRYSTALLIZATION", "crystallization_radius", lambda rng: (degrees(rng), sloped(rng)), s4,
        lambda s4, degree, p: s4.crystallization(degree, p),
        lambda degree, p: crystallization.crystallization(np.array(degree), p.s, p.epsilon),
        lambda degree, p, sizes: tolerances.crystallization_radius(np.array(degree), p.s, p.epsilon),
    ),
    Case(
        "CC-SEGMENT", "settled_radius", settled, s4, lambda s4, degree, other, p: s4.crystallization(degree, p),
        lambda degree, other, p: crystallization.crystallization(np.array(other), p.s, p.epsilon),
        lambda degree, other, p, sizes: tolerances.settled_radius(np.array(degree), p.s, p.epsilon),
    ),
    Case(
        "CC-TAIL-D", "BOUNDS", tails, decode,
        lambda decode, mu, sigma, p: [decode.edgeless_D(mu, sigma, p)], tail.edgeless_D, relative("CC-TAIL-D"),
    ),
    Case(
        "CC-DECAY", "decay_radius", faded, decode,
        lambda decode, D, M, p: [decode.decay(x, y, p) for x, y in zip(D, M, strict=True)],
        lambda D, M, p: breath.decay(np.array(D), np.array(M), p),
        lambda D, M, p, sizes: tolerances.decay_radius(np.array(D)),
    ),
    Case(
        "CC-RARITY", "BOUNDS", lambda rng: (counts(rng),), s3, lambda s3, c: [s3.rarity(x) for x in c],
        lambda c: impact.rarity(np.array(c)), relative("CC-RARITY"),
    ),
    Case(
        "CC-RARITY-FORMS", "BOUNDS", lambda rng: (rng.integers(1, 760, 8).tolist(),), s3,
        lambda s3, c: [s3.rarity_of(x, replace(PAPER, rarity="exponential")) for x in c],
        lambda c: impact.exponential_rarity(np.array(c)), relative("CC-RARITY-FORMS"),
    ),
    Case(
        "CC-IMPACT", "BOUNDS", lambda rng: (rng.uniform(0, 20, 8).tolist(), counts(rng)), s3,
        lambda s3, S, c: [s3.token_impact(x, s3.rarity(y), PAPER) for x, y in zip(S, c, strict=True)],
        lambda S, c: impact.impact(np.array(S), impact.rarity(np.array(c)), PAPER), relative("CC-IMPACT"),
    ),
    Case(
        "CC-KEY-NORM", "key_norm_error", lambda rng: (keys(rng, size(rng, 5), size(rng), 235),), decode,
        lambda decode, k: [decode.inverse_norm(k)], lambda k: inverse_key_norms(np.array(k)[:, None]),
        lambda k, sizes: tolerances.key_norm_error(len(k), len(k[0])) * sizes,
    ),
    Case(
        "CC-ATTENTION", "attention_error", attended, s1,
        lambda s1, q, k, scaling, softcap: flat(s1.attention(q, k, places(q), places(q), scaling, softcap)),
        reference_attention, attention_radius,
    ),
    Case(
        "CC-SALIENCE", "salience_radius", lambda rng: (block(rng, size(rng, 6), size(rng, 9)), PAPER), s1,
        lambda s1, A, p: s1.salience(A, p), lambda A, p: coattention.salience(np.array(A), p),
        lambda A, p, sizes: tolerances.salience_radius(A, [0.0] * len(A[0]), p.k_heads, p.M_min, "float64"),
    ),
    Case(
        "CC-INTRA", "cosine_error", rows, s1,
        lambda s1, A, B, share: [s1.cosine(s1.row_normalise(A, PAPER.epsilon), 0, 1)],
        lambda A, B, share: np.prod(coattention.row_normalise(np.array(B), PAPER.epsilon), axis=0).sum(),
        lambda A, B, share, sizes: tolerances.cosine_error(share, share, len(A[0]), 1, "float64")
        * s1.cosine(s1.row_normalise(A, PAPER.epsilon), 0, 1),
    ),
    Case(
        "NK-SCORE", "nestedkv_radius", lambda rng: (keys(rng, size(rng) + 1, 4), SMALL), nestedkv,
        lambda nestedkv, k, p: nestedkv.scores(k, p), lambda k, p: anomaly_score(np.array(k)[None], p),
        lambda k, p, sizes: tolerances.nestedkv_radius(k, p, "float64"),
    ),
)
