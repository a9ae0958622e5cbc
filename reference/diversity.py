"""The alpha selector of Set-Conditioned Diversity: a token's score falls if similar tokens are already kept.

The paper is "Minimal-Intervention KV Retention via Set-Conditioned Diversity". The paper gives no value for epsilon and
no rule for ties. In kvspec epsilon is 1e-8, and of two equal scores the lower index is chosen.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Literal, TypeAlias

import numpy as np

from spec.arrays import Bool, BoolVector, Cube, Float64, Int64, IntVector, Matrix, Vector
from spec.validate import check_diversity

__all__ = ["EPSILON", "Signature", "cosines", "diverse", "dots", "signatures", "toward_mean", "unit_rows"]

EPSILON = 1e-8
Signature: TypeAlias = Literal["flat", "layer", "head"]


def dots(V: Float64[Matrix, "n d"], x: Float64[Vector, " d"]) -> Float64[Vector, " n"]:
    """Return the inner product of each row of V with x. The products are added in the order of the channels.

    Implements: DV-COSINE
    """
    total: Vector = np.zeros(len(V))
    for c in range(V.shape[1]):
        total = total + V[:, c] * x[c]
    return total


def unit_rows(u: Float64[Matrix, "n d"]) -> Float64[Matrix, "n d"]:
    """Return each row divided by (its L2 norm + epsilon). The squares in the norm are added in channel order.

    Implements: DV-COSINE

    Source: Set-Conditioned Diversity, Eq. 1.
    """
    square = np.zeros(len(u))
    for c in range(u.shape[1]):
        square = square + u[:, c] * u[:, c]
    unit: Matrix = u / (np.sqrt(square) + EPSILON)[:, None]
    return unit


def signatures(values: Sequence[Cube], mode: Signature) -> Float64[Cube, "s n d"]:
    """Return the V-signatures of n tokens, computed from the values (H_kv, n, d) of each layer.

    A token has one signature for the whole cache (mode "flat"), one per layer ("layer"), or one per KV head ("head"). A
    signature is a mean of value vectors, scaled to length 1. The value vectors are added in ascending order of layer,
    then of KV head.

    Implements: DV-SIGNATURE

    Source: Set-Conditioned Diversity, Eq. 1.
    """
    heads = [[np.asarray(head, dtype=np.float64) for head in layer] for layer in values]
    groups = {
        "flat": [[head for layer in heads for head in layer]],
        "layer": heads,
        "head": [[head] for layer in heads for head in layer],
    }[mode]
    signatures: Cube = np.stack([unit_rows(_mean(group)) for group in groups])
    return signatures


def _mean(parts: Sequence[Matrix]) -> Float64[Matrix, "n d"]:
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    mean: Matrix = total / len(parts)
    return mean


def cosines(V: Float64[Matrix, "n d"]) -> Float64[Matrix, "n n"]:
    """Return the cosines of all pairs of signatures. Each signature has length 1, so a cosine is an inner product.

    Implements: DV-COSINE

    Source: Set-Conditioned Diversity, Algorithm 1, line 4.
    """
    return np.stack([dots(V, v) for v in V]) if len(V) else np.zeros((0, 0))


def diverse(
    s: Float64[Vector, " n"], V: Float64[Matrix, "_ d"], retained: Bool[BoolVector, " _"], k: int, lam: float,
) -> Int64[IntVector, " k"]:
    """Return k tokens, ascending: the retained tokens, and tokens chosen greedily by the largest s_i - lam m_i.

    The redundancy m_i of token i is the largest cosine between the signatures of token i and of a kept token. A
    negative m_i is replaced by 0.

    Implements: DV-GREEDY

    Source: Set-Conditioned Diversity, Eq. 2 and 3, Algorithm 1.

    Raises:
        SpecError: in all cases that `spec.backend.DiversityStages.diverse` lists.
    """
    check_diversity(s, V, retained, k, lam)
    worth, S = np.where(np.isnan(s), -np.inf, s), retained.copy()  # a retained token may have the score NaN
    m = reduce(np.maximum, (dots(V, v) for v in V[S]), np.zeros(len(V)))
    for _ in range(k - int(S.sum())):
        open_ = np.flatnonzero(~S)
        i = open_[np.argmax((worth - lam * m)[open_])]
        S[i] = True
        m = np.maximum(m, dots(V, V[i]))
    kept: IntVector = np.flatnonzero(S)
    return kept


def toward_mean(V: Float64[Matrix, "n d"]) -> Float64[Vector, " n"]:
    """Return the cosine of each signature with the mean signature. The rule `variant_b` favours large cosines.

    Implements: DV-VARIANT-B

    Source: Set-Conditioned Diversity, Table 1. The paper rejects `variant_b`, and does not define the direction that
    `variant_b` favours.
    """
    total = np.zeros(V.shape[1])
    for row in V:
        total = total + row
    (direction,) = unit_rows((total / len(V))[None])
    return dots(V, direction)
