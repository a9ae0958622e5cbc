"""The alpha selector by brute force: plain lists, from the paper's Algorithm 1.

No code is shared with other modules.
"""

import math
from collections.abc import Sequence

from conformance.oracles import added

Row = Sequence[float]


def cosine(a: Row, b: Row) -> float:
    return added([x * y for x, y in zip(a, b, strict=True)])


def alpha(s: Sequence[float], V: Sequence[Row], retained: Sequence[int], k: int, lam: float) -> list[int]:
    """Return the tokens that Algorithm 1 keeps.

    Every step compares every candidate with every kept token. NaN is the worst score.
    """
    S = list(retained)
    while len(S) < k:
        best, best_gain = -1, -math.inf
        for i in range(len(s)):
            if i in S:
                continue
            gain = -math.inf if math.isnan(s[i]) else s[i] - lam * max([0.0, *[cosine(V[i], V[j]) for j in S]])
            if best < 0 or gain > best_gain:
                best, best_gain = i, gain
        S.append(best)
    return sorted(S)
