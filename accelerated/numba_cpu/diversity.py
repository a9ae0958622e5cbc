"""Set-conditioned selection by lazy greedy search.

The search is lazy because the gain of a token never increases when tokens are added to the set of kept tokens. The gain
of a token is updated only when the token is first in the heap. A token that is still first after the update is kept. An
update compares a token only with tokens that were kept since the token's last update. No (n, n) array is made, and most
inner products are never computed. Signatures of kept tokens are stored in panels, channel by channel. Inner products
are therefore vectorised over the tokens of a panel, and each inner product adds the channels in order.
"""

import numpy as np
from numba import njit

from accelerated.numba_cpu.compiled import compiled
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Matrix, Vector

__all__ = ["diverse"]

LANES = 64  # tokens in a panel


@njit(inline="always")
def before(gain: Vector, a: int, b: int) -> bool:
    """Return True if token a has a higher gain than token b, or an equal gain and a lower position."""
    return bool(gain[a] > gain[b] or (gain[a] == gain[b] and a < b))


@compiled()
def sink(heap: IntVector, size: int, gain: Vector, at: int) -> None:
    """Restore the order of the heap by moving the token at index `at` down."""
    token = heap[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and before(gain, heap[child + 1], heap[child]):
            child += 1
        if not before(gain, heap[child], token):
            break
        heap[at], at = heap[child], child
    heap[at] = token


@compiled()
def redundancy(v: Vector, panel: Matrix, most: float, total: Vector) -> float:
    """Return the maximum of `most` and of the cosines of v with a panel (d, LANES). An empty lane has the cosine 0."""
    total[:] = 0.0
    for c in range(len(v)):
        x, row = v[c], panel[c]
        # The length is deliberately no constant. The compiler would unroll the loop and not vectorise it.
        for lane in range(len(total)):
            total[lane] += row[lane] * x
    largest: float = max(most, total.max())
    return largest


@compiled(nogil=True)
def greedy(worth: Vector, V: Matrix, retained: BoolVector, k: int, lam: float) -> BoolVector:
    """Return a mask of the k selected tokens."""
    n, d = V.shape
    panels, total = np.zeros(((k + LANES - 1) // LANES, d, LANES)), np.empty(LANES)
    S, t = np.zeros(n, dtype=np.bool_), 0
    for i in np.flatnonzero(retained):
        S[i] = True
        panels[t // LANES, :, t % LANES] = V[i]
        t += 1
    heap = np.flatnonzero(~retained)
    gain, m, known = worth.copy(), np.zeros(n), np.zeros(n, dtype=np.int64)
    size = len(heap)
    for at in range(size // 2 - 1, -1, -1):
        sink(heap, size, gain, at)
    while t < k:
        i = heap[0]
        if known[i] < t:
            p = known[i] // LANES
            m[i] = redundancy(V[i], panels[p], m[i], total)
            known[i], gain[i] = min(t, (p + 1) * LANES), worth[i] - lam * m[i]
        else:
            S[i] = True
            panels[t // LANES, :, t % LANES] = V[i]
            t += 1
            size -= 1
            heap[0] = heap[size]
        sink(heap, size, gain, 0)
    return S


def diverse(
    s: Float64[Vector, " n"], V: Float64[Matrix, "n d"], retained: Bool[BoolVector, " n"], k: int, lam: float,
) -> Int64[IntVector, " k"]:
    """Return the k selected tokens, ascending. The reference `reference.diversity.diverse` selects the same tokens.

    Implements: DV-COSINE, DV-GREEDY
    """
    worth = np.where(np.isnan(s), -np.inf, s)
    kept: IntVector = np.flatnonzero(greedy(worth, np.ascontiguousarray(V), retained, k, lam))
    return kept
