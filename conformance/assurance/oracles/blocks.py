"""Block retention by brute force, in the terms of `oracles.policies`; nothing is shared with the reference."""

import math
from collections.abc import Sequence
from fractions import Fraction

from conformance.assurance.oracles.policies import Score

__all__ = ["best_blocks", "crushed", "two_stages"]


def best_blocks(score: Sequence[float | None], b: int, B: int) -> list[int]:
    """The open block and those with a protected token (None); then one by one the best that is left, while it fits."""
    runs = [range(first, min(first + b, len(score))) for first in range(0, len(score), b)]
    kept = [run for run in runs if len(run) < b or any(score[i] is None for i in run)]
    left = [run for run in runs if run not in kept]
    while left:
        best = max(left, key=lambda run: (*worth(score[run.start : run.stop]), -run.start))
        if sum(map(len, kept)) + len(best) > B:
            break
        kept.append(best)
        left.remove(best)
    return sorted(i for run in kept for i in run)


def worth(scores: Sequence[float | None]) -> tuple[bool, float]:
    """The sum, rounded after each token; below all others where a token has no score."""
    total = 0.0
    for x in scores:
        total = total + (x or 0.0)
    return (False, 0.0) if math.isnan(total) else (True, total)


def two_stages(first: Score, second: Sequence[float | None], b: int, B: int, share: Fraction) -> list[int]:
    """CriticalKV's: blocks for a share of the places beside the protected ones, then for all places."""
    pinned = [i for i, x in enumerate(first) if x is None]
    early = best_blocks(first, b, len(pinned) + (B - len(pinned)) * share // 1)
    return best_blocks([None if i in early else x for i, x in enumerate(second)], b, B)


def crushed(rows: Sequence[Score], b: int, B: int, share: Fraction, anchor: str) -> list[list[int]]:
    """KVCrush's of a layer's heads: the best blocks, and of each run of what is left the nearest to the anchor."""
    n, open_ = len(rows[0]), len(rows[0]) % b
    runs = [range(first, first + b) for first in range(0, n - open_, b)]
    free = [run for run in runs if all(rows[0][i] is not None for i in run)]
    tokens = [i for run in free for i in run]
    good = [set(sorted(tokens, key=lambda i: (*(-x for x in worth(row[i : i + 1])), i))[: len(tokens) // 2])
            for row in rows]

    def anchored(g: int, at: int) -> bool:
        ones = sum(run[at] in good[g] for run in free)
        return {"alternating": at % 2 == 1, "mean": ones > len(free) - ones, "zeros": False, "ones": True}[anchor]

    far = {run: sum((i in own) is not anchored(g, at) for g, own in enumerate(good) for at, i in enumerate(run))
           for run in free}
    places = max(0, (B - open_) // b - (len(runs) - len(free)))
    few, found = places * share // 1, []
    for row in rows:
        kept = set(best_blocks(row, b, B - few * b))
        left = sorted((run for run in free if run[0] not in kept), key=lambda run: (far[run], run[0]))
        r = min(few, len(left))
        found.append(sorted(kept.union(*(left[at * len(left) // r] for at in range(r)))))
    return found
