"""S1: salience and neighbours of each token from the attention of the observed layer (Section 3.2).

The segment is processed in chunks of C tokens. Weights come from long sums, so they are rounded to float32 before they
are compared. The edge stores the weight in float64.
"""

import numpy as np

from spec.arrays import Cube, Float, Float64, Int64, IntMatrix, IntVector, Matrix, RawCube, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = [
    "attention", "coattention", "cross_neighbours", "intra_neighbours", "mean_salience", "row_normalise", "salience",
    "strongest",
]


def attention(
    q: Float64[Cube, "H n_q d"], k: Float64[Cube, "H_kv n_k d"], query_positions: Int64[IntVector, " n_q"],
    key_positions: Int64[IntVector, " n_k"], scaling: float, softcap: float | None,
    sinks: Float64[Vector, " H"] | None = None,
) -> Float64[Cube, "H n_q n_k"]:
    """Return causal softmax weights. Query head h uses KV head h // (H / H_kv).

    Implements: CC-ATTENTION

    Source: Eq. 3, without the product with V. A query attends to keys at its own position and before. The attention
    sink of a head is one more logit in the softmax denominator, without a column in the result.
    """
    # The query heads of one KV head stand below each other: its keys are read once for all of them.
    shared = q.reshape(k.shape[0], -1, q.shape[2])
    logits = np.matmul(shared, k.transpose(0, 2, 1)).reshape(*q.shape[:2], k.shape[1]) * scaling
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(key_positions <= query_positions[:, None], logits, -np.inf)
    if sinks is not None:
        logits = np.concatenate([logits, np.broadcast_to(sinks[:, None, None], (*q.shape[:2], 1))], axis=2)
    powers = np.exp(logits - logits.max(axis=2, keepdims=True))
    A: Cube = powers / powers.sum(axis=2, keepdims=True)
    return A[:, :, : k.shape[1]]


def salience(own: Float64[Cube, "H Q Q"], parameters: CrystalCacheParameters) -> Float64[Vector, " Q"]:
    """Return S_i: the attention that token i receives from the chunk's queries, summed over its top k_heads heads.

    Implements: CC-SALIENCE

    Source: Eq. 11. `own` are the attention weights of the chunk's queries on the chunk's keys.
    """
    h: Matrix = own.sum(axis=1)
    top = np.sort(h, axis=0)[::-1][: parameters.k_heads]
    S: Vector = np.clip(top.sum(axis=0), parameters.M_min, parameters.M_max)
    return S


def mean_salience(own: Float64[Cube, "H Q Q"], parameters: CrystalCacheParameters) -> Float64[Vector, " Q"]:
    """Return S_i of the essay: the mean over token i's best k_heads heads instead of the sum.

    Implements: CC-MEAN-SALIENCE

    Source: the essay, section 3. If there are fewer heads, the mean is over all heads. If k_heads is 0, the mean is 0.
    """
    h: Matrix = own.sum(axis=1)
    top = np.sort(h, axis=0)[::-1][: parameters.k_heads]
    S: Vector = np.clip(top.sum(axis=0) / max(1, len(top)), parameters.M_min, parameters.M_max)
    return S


_SALIENCE = {"sum": salience, "mean": mean_salience}


def row_normalise(A: Float64[Matrix, "Q Q"], epsilon: float) -> Float64[Matrix, "Q Q"]:
    """Return the rows of A divided by (their L2 norm + epsilon). A is the head-mean attention inside the chunk.

    Implements: CC-ROW-NORM

    Source: Eq. 12. A zero row stays zero.
    """
    norm: Matrix = np.sqrt((A * A).sum(axis=1, keepdims=True))
    return A / (norm + epsilon)


def strongest(
    weights: Float64[Matrix, "rows columns"], k: int, tau: float,
) -> tuple[Int64[IntMatrix, "rows k"], Float64[Matrix, "rows k"]]:
    """Return columns and weights of the k largest weights above tau in each row, largest first.

    On a tie the lower column comes first. Weights and tau are compared in float32. Unused entries are -1 with weight 0.
    """
    key = weights.astype(np.float32)
    order = np.argsort(-key, axis=1, kind="stable")[:, :k]
    passes = np.take_along_axis(key, order, axis=1) > np.float32(tau)
    index = np.full((len(weights), k), -1, dtype=np.int64)
    weight = np.zeros((len(weights), k))
    index[:, : order.shape[1]] = np.where(passes, order, -1)
    weight[:, : order.shape[1]] = np.where(passes, np.take_along_axis(weights, order, axis=1), 0.0)
    return index, weight


def intra_neighbours(
    rows: Float64[Matrix, "Q Q"], parameters: CrystalCacheParameters,
) -> tuple[Int64[IntMatrix, "Q k"], Float64[Matrix, "Q k"]]:
    """Return each token's most similar tokens of the same chunk, by the cosine of their normalised attention rows.

    Implements: CC-INTRA

    Source: Eq. 13. Neighbours may come before or after the token. The token itself is excluded.
    """
    cosine = np.matmul(rows, rows.T)
    np.fill_diagonal(cosine, -1.0)
    return strongest(cosine, parameters.k_intra, parameters.tau_intra)


def cross_neighbours(
    earlier: Float64[Matrix, "Q before"], parameters: CrystalCacheParameters,
) -> tuple[Int64[IntMatrix, "Q k"], Float64[Matrix, "Q k"]]:
    """Return the earlier tokens, outside the chunk, to which each token attends most, by head-mean attention.

    Implements: CC-CROSS

    Source: Eq. 14. A token of the first chunk has no such neighbour.
    """
    return strongest(earlier, parameters.k_cross, parameters.tau_cross)


def coattention(
    q: Float[RawCube, "H n d"], k: Float[RawCube, "H_kv live d"], positions: Int64[IntVector, " live"],
    parameters: CrystalCacheParameters, scaling: float, softcap: float | None,
    sinks: Float64[Vector, " H"] | None = None,
) -> CoAttention:
    """Return the result of S1 for a segment of n tokens. The keys of the segment are the last n of the live keys.

    Chunks are counted from the first token of the segment.

    Implements: CC-COATTENTION

    Source: Section 3.2, Algorithm 2, lines 1-21.
    """
    n = q.shape[1]
    before = k.shape[1] - n
    wide_q, wide_k = q.astype(np.float64), k.astype(np.float64)
    S = np.empty(n)
    intra, cross = _empty(n, parameters.k_intra), _empty(n, parameters.k_cross)
    for c in range(0, n, parameters.C):
        chunk = slice(c, min(c + parameters.C, n))
        first, last = before + c, before + chunk.stop
        A = attention(
            wide_q[:, chunk], wide_k[:, :last], positions[first:last], positions[:last], scaling, softcap, sinks
        )
        S[chunk] = _SALIENCE[parameters.heads](A[:, :, first:], parameters)
        A_mean: Matrix = A.mean(axis=0)
        index, intra[1][chunk] = intra_neighbours(row_normalise(A_mean[:, first:], parameters.epsilon), parameters)
        intra[0][chunk] = _positions_of(index, positions[first:last])
        index, cross[1][chunk] = cross_neighbours(A_mean[:, :first], parameters)
        cross[0][chunk] = _positions_of(index, positions[:last])
    return CoAttention(int(positions[before]), S, *intra, *cross)


def _empty(n: int, k: int) -> tuple[IntMatrix, Matrix]:
    return np.full((n, k), -1, dtype=np.int64), np.zeros((n, k))


def _positions_of(index: Int64[IntMatrix, "Q k"], positions: Int64[IntVector, " m"]) -> IntMatrix:
    return np.where(index >= 0, positions[index], -1)
