"""S1: salience and neighbours of each token, computed from the attention of the observed layer (Section 3.2).

The segment is processed in chunks of C tokens. Edges store weights in float64. Weights are compared in float32, because
long sums cause rounding errors in the weights.
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
    """Return causal attention weights (softmax). Query head h uses KV head h // (H / H_kv).

    Implements: CC-ATTENTION

    Source: Eq. 3, without the product with V. A query attends to keys up to the position of the query. Attention sinks
    add one logit per query head to the softmax, but no column to the result.
    """
    # Query heads that share a KV head are stacked, so the keys of a KV head are used in one product.
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
    """Return S_i: the attention to token i, summed over the k_heads heads with the largest attention to token i.

    Implements: CC-SALIENCE

    Source: Eq. 11. S_i is clipped to [M_min, M_max]. `own` contains the attention weights from the chunk's queries to
    the chunk's keys. The attention to a token is summed over the queries of the chunk.
    """
    h: Matrix = own.sum(axis=1)
    top = np.sort(h, axis=0)[::-1][: parameters.k_heads]
    S: Vector = np.clip(top.sum(axis=0), parameters.M_min, parameters.M_max)
    return S


def mean_salience(own: Float64[Cube, "H Q Q"], parameters: CrystalCacheParameters) -> Float64[Vector, " Q"]:
    """Return S_i of the essay: the attention to token i, averaged over the k_heads heads with the most attention to i.

    Implements: CC-MEAN-SALIENCE

    Source: the essay, section 3. The attention of each head is first summed over the queries of the chunk. If there are
    fewer than k_heads heads, the mean is over all heads. If k_heads is 0, the mean is 0. The mean is clipped to [M_min,
    M_max].
    """
    h: Matrix = own.sum(axis=1)
    top = np.sort(h, axis=0)[::-1][: parameters.k_heads]
    S: Vector = np.clip(top.sum(axis=0) / max(1, len(top)), parameters.M_min, parameters.M_max)
    return S


_SALIENCE = {"sum": salience, "mean": mean_salience}


def row_normalise(A: Float64[Matrix, "Q Q"], epsilon: float) -> Float64[Matrix, "Q Q"]:
    """Return each row of A divided by (L2 norm of the row + epsilon).

    A is the attention inside the chunk, averaged over the query heads.

    Implements: CC-ROW-NORM

    Source: Eq. 12. A row of zeros is unchanged. Algorithm 2 (line 13) has no epsilon, so such a row would become NaN.
    """
    norm: Matrix = np.sqrt((A * A).sum(axis=1, keepdims=True))
    return A / (norm + epsilon)


def strongest(
    weights: Float64[Matrix, "rows columns"], k: int, tau: float,
) -> tuple[Int64[IntMatrix, "rows k"], Float64[Matrix, "rows k"]]:
    """Return the columns and values of the k largest weights above tau in each row, largest first.

    Of two equal weights, the weight in the lower column is first. Weights and tau are compared in float32. Unused
    entries have column -1 and weight 0.
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
    """Return up to k_intra neighbours of each token: the most similar tokens of the same chunk.

    Implements: CC-INTRA

    Source: Eq. 13. The similarity of two tokens is the cosine of their normalised attention rows, and must exceed
    tau_intra. A neighbour may be before or after the token. A token is not a neighbour of itself.
    """
    cosine = np.matmul(rows, rows.T)
    np.fill_diagonal(cosine, -1.0)
    return strongest(cosine, parameters.k_intra, parameters.tau_intra)


def cross_neighbours(
    earlier: Float64[Matrix, "Q before"], parameters: CrystalCacheParameters,
) -> tuple[Int64[IntMatrix, "Q k"], Float64[Matrix, "Q k"]]:
    """Return up to k_cross neighbours of each token of a chunk: the tokens before the chunk with the most attention.

    Implements: CC-CROSS

    Source: Eq. 14. The first chunk of a prompt has no cross neighbours, because no token is before the chunk. The
    attention to a neighbour is averaged over heads, and must exceed tau_cross.
    """
    return strongest(earlier, parameters.k_cross, parameters.tau_cross)


def coattention(
    q: Float[RawCube, "H n d"], k: Float[RawCube, "H_kv live d"], positions: Int64[IntVector, " live"],
    parameters: CrystalCacheParameters, scaling: float, softcap: float | None,
    sinks: Float64[Vector, " H"] | None = None,
) -> CoAttention:
    """Return salience and neighbours (S1) of a segment of n tokens. The last n keys in `k` are the segment's keys.

    The first chunk begins at the first token of the segment. `k` has the keys of all cached tokens: first the keys of
    the `before` tokens before the segment, then the keys of the segment. `positions` has the absolute positions of
    these tokens, ascending. S1 is computed in float64.

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
