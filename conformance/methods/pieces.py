"""Runs of successive tokens, each of which is decided alone, by brute force (PO-PIECES)."""

from collections.abc import Sequence

from conformance.oracles.choices import Answer, surely


def runs(n: int, c: int) -> list[range]:
    """Return runs of c successive tokens. The last run may be shorter."""
    return [range(start, min(start + c, n)) for start in range(0, n, c)]


def joined(kept: Answer, more: Sequence[int], first: int) -> Answer:
    """Return a kept set with the tokens of a further piece. Rounding may exchange tokens in one piece only."""
    open_: frozenset[int] = getattr(more, "open", frozenset())
    if open_:
        surely(kept)
    result = Answer([*kept, *(first + i for i in more)])
    result.open = kept.open | {first + i for i in open_}
    return result
