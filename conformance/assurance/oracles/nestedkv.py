"""What NestedKV keeps, by brute force: plain lists, from the paper's text and Appendix A."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from conformance.oracles.nestedkv import Row

__all__ = ["kept", "tokens"]


def tokens(r: str, N: int) -> int:
    """Tokens that stay where the decimal share r goes, counted up from nothing."""
    kept = 0
    while Fraction(kept + 1) <= (1 - Fraction(r)) * N:
        kept += 1
    return kept


def kept(rows: Sequence[Row], B: int, p: Any) -> list[list[int]]:
    """A layer's kept sets: sinks at infinity, each head's quota of its own best, then the best pairs of the layer."""
    pinned = [[math.inf if i < p.N_sink else x for i, x in enumerate(row)] for row in rows]
    order = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i)) for row in pinned]  # type: ignore[misc]
    chosen = {(h, i) for h, best in enumerate(order) for i in best[: int(p.alpha_s * B // 1)]}
    pairs = sorted((-x, h, i) for h, row in enumerate(pinned) for i, x in enumerate(row) if (h, i) not in chosen)
    chosen |= {(h, i) for _, h, i in pairs[: len(rows) * min(B, len(rows[0])) - len(chosen)]}
    return [sorted(i for g, i in chosen if g == h) for h in range(len(rows))]
