"""Inner loops of stage S1 in float32, run without the GIL. Logits are base 2: a weight is 2 ** (s - lse)."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from accelerated.numba_cpu.compiled import compiled

__all__ = [
    "FAST",
    "accumulate_attention",
    "bound_weights",
    "chunk_attention",
    "insert_best",
    "normalise_rows",
    "running_lse",
    "tile_peaks",
]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# The compiler may reorder sums to vectorise the loops, but must handle NaN and infinity. The compiled code fixes the
# order, so results repeat. The certified bound of S1 includes the rounding error.
FAST = {"reassoc", "contract", "nsz"}
f32 = np.float32
FAR_BELOW = f32(-40.0)  # 256 weights of 2 ** -40 do not change the row's sum in float32
LOWEST = f32(-3e38)
SMALLEST = f32(-126.0)
GROUP = 16  # number of keys that are compared at once with the last entry of a list

# Taylor coefficients ln(2) ** i / i! of 2 ** f on [-1/2, 1/2]. The relative error is below 2e-7.
C1, C2, C3 = f32(0.6931471805599453), f32(0.2402265069591007), f32(0.0555041086648216)
C4, C5, C6 = f32(0.0096181291076285), f32(0.0013333558146428), f32(0.0001540353039338)


@njit(fastmath=FAST, inline="always")
def exp2(x: np.float32) -> np.float32:
    """Return 2 ** x for x <= 0 in float32. Subnormal results become 0. Numba would not vectorise np.exp2."""
    safe = max(x, SMALLEST)
    whole = np.floor(safe + f32(0.5))
    f = safe - whole
    power = ((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1
    scale = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2 ** whole, from bits
    result: np.float32 = (power * f + f32(1.0)) * scale
    return result if x >= SMALLEST else f32(0.0)


@njit(nogil=True, inline="always")
def largest(bits: NDArray[np.int32], start: int, stop: int) -> np.float32:
    """Return the largest of several floats of a row. The floats are given as bits.

    Numba vectorises a maximum of integers, but not a maximum of floats. As integers, the bits of negative floats are
    in reverse order, so all bits of a negative float except the sign are flipped.
    """
    top = np.int32(-(2**31))
    for j in range(start, stop):
        top = max(top, np.int32(bits[j] ^ ((bits[j] >> np.int32(31)) & np.int32(2**31 - 1))))
    return np.int32(top ^ ((top >> np.int32(31)) & np.int32(2**31 - 1))).view(np.float32)


@compiled(nogil=True)
def tile_peaks(S: Floats, tile_peak: Floats) -> None:
    """Write the largest logit of each row of a tile (rows, keys) to `tile_peak`."""
    bits = S.view(np.int32)
    for r in range(S.shape[0]):
        tile_peak[r] = largest(bits[r], 0, S.shape[1])


@compiled(nogil=True, fastmath=FAST)
def running_lse(S: Floats, peak: Floats, total: Floats, tile_peak: Floats, reach: Ints) -> None:
    """Update the running maximum and sum of each row with a tile of logits (rows, keys), and store the tile's maximum.

    Row r attends to the first reach[r % queries] keys of the tile. Each entry of `reach` is at least 1.
    """
    bits = S.view(np.int32)
    for r in range(S.shape[0]):
        width = min(S.shape[1], reach[r % len(reach)])
        s = S[r]
        top = largest(bits[r], 0, width)
        tile_peak[r] = top
        if top < peak[r] + FAR_BELOW:
            continue
        new = max(peak[r], top)
        added = f32(0.0)
        for j in range(width):
            added += exp2(s[j] - new)
        total[r] = total[r] * exp2(peak[r] - new) + added
        peak[r] = new


@compiled(nogil=True, fastmath=FAST)
def chunk_attention(S: Floats, lse: Floats, column: Floats, A: Floats, first_query: int, share: np.float32) -> None:
    """Compute the attention inside a chunk. Add the column sums of each head to `column`, and the head mean to A."""
    queries = A.shape[0]
    for h in range(column.shape[0]):
        for i in range(queries):
            width = min(S.shape[1], first_query + i + 1)
            s, a, to, level = S[h * queries + i], A[i], column[h], lse[h * queries + i]
            for j in range(width):
                p = exp2(s[j] - level)
                to[j] += p
                a[j] += p * share


@compiled(nogil=True, fastmath=FAST)
def bound_weights(tile_peak: Floats, lse: Floats, bound: Floats) -> None:
    """Write to bound[t, i] an upper bound on row i's weight on any key of tile t, summed over the heads.

    In one head the weight is at most 2 ** (peak - lse), with the peak of this head in the tile.
    """
    tiles, heads, queries = tile_peak.shape
    for t in range(tiles):
        for i in range(queries):
            most = f32(0.0)
            for h in range(heads):
                most += exp2(min(tile_peak[t, h, i] - lse[h, i], f32(0.0)))
            bound[t, i] = most


@compiled(nogil=True, fastmath=FAST)
def accumulate_attention(S: Floats, rows: Ints, lse: Floats, W: Floats) -> None:
    """Add the attention weights of several heads, from logits S (heads x rows, keys), to W (rows, keys)."""
    for h in range(lse.shape[0]):
        for a in range(len(rows)):
            s, w, level = S[h * len(rows) + a], W[a], lse[h, rows[a]]
            for j in range(S.shape[1]):
                w[j] += exp2(s[j] - level)


@compiled(nogil=True)
def insert_best(
    W: Floats, rows: Ints, share: np.float32, tau: np.float32, first_key: int, index: Ints, weight: Floats,
) -> None:
    """Merge W * share (rows, keys) into the list of the largest weights of each row. On a tie the earlier key is kept.

    Most weights are below the smallest entry of the row's list. The function therefore computes maxima of rows and of
    groups of keys, and skips a row or group whose maximum is too small.
    """
    k, bits = index.shape[1], W.view(np.int32)
    for a in range(len(rows)):
        w, row, chosen, kept = W[a], bits[a], index[rows[a]], weight[rows[a]]
        if largest(row, 0, len(w)) * share <= max(tau, kept[k - 1]):
            continue
        for start in range(0, len(w), GROUP):
            stop = min(start + GROUP, len(w))
            if largest(row, start, stop) * share > max(tau, kept[k - 1]):
                for j in range(start, stop):
                    place(w[j] * share, first_key + j, tau, chosen, kept, k)


@njit(nogil=True, inline="always")
def place(w: np.float32, key: int, tau: np.float32, index: Ints, weight: Floats, k: int) -> None:
    """Insert one candidate into a row's list, which is sorted in descending order."""
    if w > tau and w > weight[k - 1]:
        p = k - 1
        while p > 0 and weight[p - 1] < w:
            weight[p], index[p] = weight[p - 1], index[p - 1]
            p -= 1
        weight[p], index[p] = w, key


@compiled(nogil=True, fastmath=FAST)
def normalise_rows(A: Floats, epsilon: np.float32) -> None:
    """Normalise the rows of A in place (Eq. 12)."""
    for i in range(A.shape[0]):
        square = f32(0.0)
        for j in range(A.shape[1]):
            square += A[i, j] * A[i, j]
        scale = f32(1.0) / (np.sqrt(square) + epsilon)
        for j in range(A.shape[1]):
            A[i, j] *= scale
