"""Whole chunks by the scores of single tokens, and the entropy of their scores, by brute force (PO-CHUNKS)."""

from collections.abc import Sequence
from typing import Any

from conformance.methods.policies import Score
from conformance.oracles.boxes import fsum, least, log


def head_sums(rows: Sequence[Score], heads: int) -> list[Score]:
    """Return the sums of the scores of each layer's heads. A token without a score has none."""
    return [
        [None if None in column else fsum(column) for column in zip(*rows[at : at + heads], strict=True)]
        for at in range(0, len(rows), heads)
    ]


def entropy(scores: Sequence[Any]) -> Any:
    """Return the entropy of the scores in units of log of their number."""
    low = least([0.0, *scores])
    shifted = [x - low for x in scores]
    total = fsum(shifted)
    if len(scores) < 2 or total == 0:
        return 0.0
    if all(x == shifted[0] for x in shifted):
        return 1.0
    shares = [x / total for x in shifted if x > 0]
    return least([1.0, fsum(-p * log(p) for p in shares) / log(len(scores))])


def chunk_sets(row: Score, share: int, c: int, gate: int) -> list[int]:
    """Return the tokens that a set keeps. `row` has None for the protected tokens."""
    score: dict[int, Any] = {at: x for at, x in enumerate(row) if x is not None}
    runs = [[at for at in range(start, min(start + c, len(row))) if at in score] for start in range(0, len(row), c)]
    chunks = [run for run in runs if run]
    mean = [fsum(score[at] for at in chunk) / len(chunk) for chunk in chunks]
    even = [entropy([score[at] for at in chunk]) for chunk in chunks]
    kept = [at for at in range(len(row)) if at not in score]
    half = (len(chunks) - 1) // 2
    for u in sorted(range(len(chunks)), key=lambda u: (-mean[u], u)):
        inside = sorted(chunks[u], key=lambda at: (-score[at], at))
        if gate and mean[u] >= sorted(mean)[half] and even[u] < sorted(even)[half]:
            inside = inside[:gate]
        kept += inside[: max(0, share - len(kept))]
    others = sorted((at for at in score if at not in kept), key=lambda at: (-score[at], at))
    return sorted([*kept, *others[: max(0, share - len(kept))]])


def chunked(scores: Score, row: Score, c: int, share: int) -> list[int]:
    """Return the protected tokens, then whole chunks, then the best tokens of one more chunk (PO-FILL-UNITS).

    A chunk with a protected token is the last choice.
    """
    past = sum(x is not None for x in scores)
    kept = [i for i, x in enumerate(row) if x is None]
    chunks = [range(a, min(a + c, past)) for a in range(0, past, c)]
    totals = [fsum(scores[i] for i in chunk) for chunk in chunks]
    held = [any(row[i] is None for i in chunk) for chunk in chunks]
    for u in sorted(range(len(chunks)), key=lambda u: (held[u], -totals[u], u)):
        inside = sorted((i for i in chunks[u] if row[i] is not None), key=lambda i: (-scores[i], i))  # type: ignore[operator]
        kept += inside[: max(0, share - len(kept))]
    return sorted(kept)
