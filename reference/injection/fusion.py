"""Reciprocal rank fusion (RRF) of several retrievers' rankings. Chunks with equal scores are sorted by name."""

from collections.abc import Sequence

__all__ = ["fused"]


def fused(rankings: Sequence[Sequence[str]], k: int = 60) -> list[tuple[str, float]]:
    """Return chunks and scores, best first.

    The score of a chunk is the sum of 1 / (k + rank) over all rankings that contain the chunk. If a ranking contains a
    chunk twice, the second entry is ignored, and has no rank.

    Implements: IN-FUSE

    Source: Appendix C ("RRF (k=60)"). Scores that agree to 12 decimals tie, because sums of the same terms in a
    different order have different last bits.
    """
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, chunk in enumerate(dict.fromkeys(ranking), start=1):
            scores[chunk] = scores.get(chunk, 0.0) + 1 / (k + rank)
    return sorted(scores.items(), key=lambda pair: (-round(pair[1], 12), pair[0]))
